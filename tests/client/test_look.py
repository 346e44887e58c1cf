"""``look`` shows the heads of a model by its name, or of a folder that lies anywhere."""

import os
import shutil

import pytest

import attention_client
from attention_client import Forbidden, look
from attention_client.servers import looks
from tests.client.cli.command_line import invoke
from tests.conftest import live_server

pytest.importorskip("transformers")
TEXT = "the cat sat on the mat"


def test_a_look_is_that_of_the_command_and_a_map_in_a_notebook(server, monkeypatch):
    monkeypatch.setenv("ATTENTION_URL", server)
    found = look("tiny", TEXT, layer=1, head=[0, 2])
    printed = invoke(
        ["look", "tiny", TEXT, "--layer", "1", "--head", "0", "--head", "2"], env={"ATTENTION_URL": server}
    )
    assert len(repr(found).splitlines()) <= 12
    assert str(found).splitlines()[:-1] == printed.stdout.splitlines()[:-1]  # but for the times
    assert found.reply.layers[0].weights.shape[0] == 2
    assert "L1H2" in found._repr_html_()
    assert len(look("tiny", TEXT).reply.layers) == 4
    with pytest.raises(Forbidden, match="hub"):  # it would be fetched
        attention_client.look("nobody/nothing", TEXT)
    looks._named(server).close()
    looks._named.cache_clear()


def test_a_repository_of_the_hub_is_fetched_once(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    from attention_service.modules.checkpoints.checkpoint_files import SHIPPED_MODEL
    from tests.api.hub import hub, hub_of_this_process

    shutil.copytree(SHIPPED_MODEL, tmp_path / "hub" / "org" / "net")
    (tmp_path / "models").mkdir()
    with (
        hub(tmp_path / "hub") as served,
        hub_of_this_process(served.address),
        live_server(tmp_path / "models", hub=True) as url,
    ):
        served.go_on.set()
        monkeypatch.setenv("ATTENTION_URL", url)
        for _ in range(2):
            assert look("org/net", TEXT, layer=0).reply.ran.model == "org--net"
        assert served.taken.count("model.safetensors") == 1
        looks._named(url).close()
        looks._named.cache_clear()


@pytest.mark.slow  # a server and a model's process start anew; test_local has such a server in every run
def test_a_folder_is_read_where_it_lies_by_a_server_of_the_process(tmp_path, monkeypatch, client):
    from attention_service.modules.checkpoints.checkpoint_files import SHIPPED_MODEL

    monkeypatch.delenv("ATTENTION_URL", raising=False)
    shutil.copytree(SHIPPED_MODEL, tmp_path / "cache" / "blobs")  # as the cache of the hub has it
    folder = tmp_path / "cache" / "snapshots" / "of"
    folder.mkdir(parents=True)
    for file in os.listdir(SHIPPED_MODEL):
        (folder / file).symlink_to(f"../../blobs/{file}")
    monkeypatch.chdir(folder.parent)
    try:
        found, again = look("of", TEXT, layer=0).reply, look(folder, TEXT, layer=0).reply
        assert looks._kept.cache_info().misses == 1
    finally:
        looks._kept(looks._root_of(folder), os.getpid()).close()
        looks._kept.cache_clear()
    weights = client.models.weights("tiny", TEXT, layers=[0]).layers[0].weights
    for reply in (found, again):
        assert abs(reply.layers[0].weights - weights).max() < 1e-6
    assert sorted(entry.name for entry in (tmp_path / "cache").iterdir()) == ["blobs", "snapshots"]
