"""deploy/monitoring: metrics that exist, rules that fire, and a real Prometheus that scrapes a server by them."""

import json
import re
import shutil
import socket
import subprocess
import time

import httpx
import numpy as np
import pytest
import yaml
from tools.docs.metrics_page import metrics
from tools.docs.snippets import ROOT

from attention_client import Client
from attention_contract.errors import error_classes
from tests.conftest import live_server

FOLDER = ROOT / "deploy" / "monitoring"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "attention.json").read_text())
PANELS = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in DASHBOARD["panels"]}
QUERIES = {rule["alert"]: [rule["expr"]] for rule in RULES} | PANELS
INSTALL = "needs Prometheus: apt-get install prometheus"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason=INSTALL)
QUERY = np.ones((2, 3, 8), "float32")


@pytest.fixture(scope="module")
def described():
    return metrics()


@pytest.mark.parametrize("title", QUERIES)
def test_queries_name_metrics_and_labels_that_exist(described, title):
    series = {name: each for each in described for name in each.series}
    for query in QUERIES[title]:
        named = set(re.findall(r"\b(?:attention|process)_\w+", query))
        assert named <= series.keys(), query
        known = {"instance", "job", "le"} | {label for name in named for label in series[name].labels}
        used = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
        used += [name for listed in re.findall(r"(?:by|ignoring) \(([^)]*)\)", query) for name in listed.split(", ")]
        assert set(used) <= known, query
    assert named or title == "AttentionDown"


def test_rules_name_codes_of_problems_that_exist():
    codes = {code for query in QUERIES.values() for code in re.findall(r'code="(\w+)"', str(query))}
    assert codes
    assert codes <= error_classes().keys()


def test_each_alert_has_a_case_in_which_it_fires_and_a_row_in_the_documents():
    cases = (FOLDER / "alerts_test.yml").read_text()
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for rule in RULES:
        assert f'alertname="{rule["alert"]}"' in cases
        assert f"| `{rule['alert']}` |" in page


def promtool(*arguments):
    done = subprocess.run([PROMTOOL, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_rules_fire_when_they_should():
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")


def configured(folder, target):
    """The configuration as it is shipped, but for the address of the server, the path of the key, and the pace."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    (scraped,) = config["scrape_configs"]
    assert scraped.pop("dns_sd_configs")[0]["names"] == ["attention", "attention-cuda"]
    scraped["static_configs"] = [{"targets": [target]}]
    (folder / scraped["authorization"]["credentials_file"]).write_text("of-no-use-here")
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    promtool("check", "config", str(path))
    return path


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None or PROMTOOL is None, reason=INSTALL)
def test_a_real_prometheus_scrapes_a_server_and_evaluates_everything(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with live_server(tmp_path / "models") as url, Client(url) as client:
        for _ in range(3):
            client.attention.forward(QUERY, QUERY, QUERY, num_heads=2)
        config = configured(tmp_path, url.removeprefix("http://"))
        command = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
                   f"--web.listen-address={address}", "--log.level=error"]  # fmt: skip
        with (tmp_path / "log").open("w") as log:
            prometheus = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://{address}/api/v1") as http:
                evaluate(http)
        finally:
            prometheus.terminate()
            prometheus.wait(10)


def evaluate(http):
    def query(text):
        answer = http.get("/query", params={"query": text})
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # it listens before it answers
            return []
        found = answer.json()
        assert found["status"] == "success", (text, found)
        return found["data"]["result"]

    def rules():
        return [rule for group in http.get("/rules").json()["data"]["groups"] for rule in group["rules"]]

    until(lambda: query('up{job="attention"} == 1'))
    until(lambda: rules() and all(rule["health"] == "ok" for rule in rules()))
    assert {rule["name"] for rule in rules()} == {rule["alert"] for rule in RULES}
    assert not [rule["name"] for rule in rules() if rule["state"] == "firing"]
    (count,) = query('attention_requests_total{operation="raw_forward",status="200"}')
    assert count["value"][1] == "3"
    for phase in ("read", "decode", "queue", "compute", "encode", "write"):
        assert query(f'attention_phase_seconds_count{{phase="{phase}"}}')
    until(lambda: query("rate(attention_requests_total[1m])"))
    shown = {}
    for title, texts in PANELS.items():
        for text in texts:
            found = query(text.replace('instance=~"$instance"', 'instance=~".+"').replace("$__rate_interval", "1m"))
            shown[title] = shown.get(title, 0) + len(found)
    # Nothing has failed or drifted on this server; every other panel shows something.
    assert {title for title, found in shown.items() if not found} <= {"Problems by code", "Problems by caller"}


def until(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if holds():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("it did not come to hold")
