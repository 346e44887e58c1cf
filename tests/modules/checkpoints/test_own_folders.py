"""A checkpoint may have the name of a folder of the server's own: it is opened, and what the server keeps is not."""

import pytest
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import tiny
from tests.conftest import live_server

from attention_client import CheckpointNotFound, Client, InvalidRequest
from attention_service.modules.checkpoints.checkpoint_files import OWN_FOLDERS

pytestmark = pytest.mark.filterwarnings("ignore:os.fork")
WIDE = [0.5] * 64


def keep_some(client, root):
    """Let the server keep one of each kind. Returns the paths of what it keeps."""
    client.modules.create("mine", {"d_model": 8, "num_heads": 2})
    client.models.forward("tiny", "the cat", keep=True)
    client.models.fit_lens("tiny", ["the cat sat on the mat"], skip_first=1)
    client.models.fit_probe("tiny", {"point": "hidden", "layer": 1}, weights=WIDE)
    client.vectors.fit("tiny", directions={"1": WIDE})
    return {name: [path.relative_to(root).as_posix() for path in (root / name).rglob("*")] for name in OWN_FOLDERS}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def client(root):
    with live_server(root) as url, Client(url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def kept(client, root):
    """The paths of what the server keeps by its folder, before checkpoints lie there and in folders below."""
    paths = keep_some(client, root)
    assert [each.id for each in client.models.list().data] == ["tiny"]
    assert [each.path for each in client.checkpoints.list().checkpoints] == ["tiny"]
    for name in OWN_FOLDERS:
        with pytest.raises(CheckpointNotFound):
            client.checkpoints.get(name)
        for folder in (root / name, root / name / "other"):
            tiny("llama").save_pretrained(folder)
            tokenizer().save_pretrained(folder)
    return paths


@pytest.mark.parametrize("name", OWN_FOLDERS)
def test_a_checkpoint_of_the_name_of_an_own_folder_is_listed(client, kept, name):
    for path in (name, f"{name}/other"):
        (model,) = [each for each in client.models.list().data if each.checkpoint == path]
        assert model.takes
        assert path in [each.path for each in client.checkpoints.list().checkpoints]
        assert client.checkpoints.get(path).layers == 2


def test_such_a_checkpoint_answers(client, kept):
    assert client.models.forward(OWN_FOLDERS[-1], "the cat").predictions


@pytest.mark.parametrize("name", OWN_FOLDERS)
def test_what_the_server_keeps_beside_it_is_no_checkpoint(client, kept, name):
    assert kept[name]
    listed = {each.path for each in client.checkpoints.list().checkpoints}
    assert listed.isdisjoint(kept[name])
    for path in kept[name]:
        with pytest.raises(CheckpointNotFound):
            client.checkpoints.get(path)
        with pytest.raises((CheckpointNotFound, InvalidRequest)):
            client.modules.import_(path)


def test_what_the_server_keeps_is_found_beside_checkpoints(client, kept):
    assert [each.name for each in client.modules.list().modules] == ["mine"]
    assert len(client.recordings.list().recordings) == len(client.models.lenses("tiny").lenses) == 1
    assert len(client.models.probes("tiny").probes) == len(client.vectors.list("tiny").vectors) == 1
