"""Tables of replies, read back by pyarrow from each form of file."""

from io import BytesIO

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from attention_contract.arrow_tables import TableRows, write_table
from attention_contract.schemas.openai import Completion

RAN = {"weights": "float32"}


def read(content, form):
    if form == "parquet":
        return parquet.read_table(BytesIO(content))
    return (pa.ipc.open_file if form == "arrow" else pa.ipc.open_stream)(content).read_all()


@pytest.mark.parametrize("form", ["parquet", "arrow", "stream"])
def test_every_form_reads_back_with_its_types_and_its_missing_values(form):
    rows = TableRows()
    rows.add(2, {"text": 0, "layer": 3, "x": np.array([1, 2], ml_dtypes.bfloat16), "by_key": np.eye(2)})
    rows.add(1, {"text": 1, "layer": "encoder.0", "y": np.array([7], np.int32), "by_key": np.ones((1, 3))})
    table = read(write_table(rows.table(), form), form)
    assert table.to_pydict() == {
        "text": [0, 0, 1],
        "layer": ["3", "3", "encoder.0"],
        "x": [1.0, 2.0, None],
        "by_key": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0, 1.0]],
        "y": [None, None, 7],
    }
    assert table.schema.field("x").type == pa.float32()
    assert table.schema.field("by_key").type == pa.list_(pa.float64())


def test_the_rows_of_generated_tokens_name_choice_token_layer_and_head():
    def token(position, **more):
        layer = {"layer": 0, "statistics": {"entropy": [0.5, 0.25], "classes": {"names": [0.0, 1.0]}}}
        top = {"top_keys": {"keys": [[1, 0], [0, -1]], "weights": [[0.9, 0.1], [1.0, 0.0]]}}
        return {"position": position, "token": f"t{position}", "id": position, "layers": [layer | top], **more}

    given = {
        "id": "a", "created": 0, "model": "net",
        "choices": [
            {"index": 0, "text": "x", "attention": [token(4), token(5, scores={"p": 2.5})]},
            {"index": 1, "text": "y", "attention": [token(4, seconds=[0.5, 0.75])]},
        ],
    }  # fmt: skip
    table = Completion.model_validate(given).to_table(heads=[3, 1]).to_pydict()
    assert table["choice"] == [0, 0, 0, 0, 1, 1]
    assert table["position"] == [4, 4, 5, 5, 4, 4]
    assert table["head"] == [3, 1] * 3
    assert table["entropy"] == [0.5, 0.25] * 3
    assert table["classes.names"] == [0.0, 1.0] * 3
    assert table["top_keys"] == [[1, 0], [0, -1]] * 3
    assert table["scores.p"] == [None, None, 2.5, 2.5, None, None]
    assert table["end_s"] == [None] * 4 + [0.75] * 2
