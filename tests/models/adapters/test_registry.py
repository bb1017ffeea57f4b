"""The registry on a real SQLite store, and over a real MLflow server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save_file

from errors import AdapterError, ConfigurationError
from models.adapters import registry as registry_file
from models.adapters.files import adapter_digest, export_adapter, order_config
from models.adapters.registry import AdapterRecord, Registry, without_password
from models.adapters.releases import (
    Aliases,
    drop_champion,
    put_release,
    read_aliases,
    registered_version,
    set_champion,
    set_live,
)
from models.adapters.runs import RunLog, put_on_version
from models.adapters.traces import PlayedTrace

CAPABILITY = "set_address"


def adapter_folder(path: Path, value: float = 1.0) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "base_model_name_or_path": "tiny"})
    )
    save_file({"layers.0.q_proj.lora_A.weight": np.full((4, 8), value, np.float32)}, path / "adapter_model.safetensors")
    return path


def record(**changes) -> AdapterRecord:
    return AdapterRecord(
        **({"capability": CAPABILITY, "base": "tiny", "base_revision": "abc", "round": "r1"} | changes)
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp("store")
    return f"sqlite:///{root}/new/mlflow.db", root / "artifacts"


@pytest.fixture
def registry(store, request) -> Registry:
    return Registry(store[0], f"shop-{abs(hash(request.node.name)) % 10**8}", store[1])


def registered(registry: Registry, tmp_path: Path, value: float = 1.0):
    run = registry.start_run(f"r1/{CAPABILITY}/train-{value}")
    return registry.register(record(), adapter_folder(tmp_path / f"adapter-{value}", value), run)


def test_importing_the_registry_is_light():
    code = "import sys, models.adapters.registry; print('mlflow' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_version_is_registered_tagged_and_comes_back_byte_for_byte(registry, tmp_path, monkeypatch):
    adapter = registered(registry, tmp_path)
    assert (adapter.version, adapter.name) == ("1", f"trace-{registry.target}-{CAPABILITY}")
    expected = {"sha256": adapter.sha256, "base": "tiny", "base_revision": "abc", "round": "r1", "gate": "pending"}
    assert expected.items() <= adapter.tags.items()
    assert registry.by_alias(CAPABILITY, "challenger") == adapter
    assert registry.champion(CAPABILITY) is None
    waited, real = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda place: real(place) or waited.add(os.fstat(place).st_ino))
    folder = registry.download(adapter, tmp_path / "cache")
    assert {path.stat().st_ino for path in folder.iterdir()} <= waited, "a power cut leaves no file that was changed"
    assert folder.name == f"{CAPABILITY}@v1-{adapter.sha256[:8]}"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "adapter-1.0" / name).read_bytes()
    assert registry.download(adapter, tmp_path / "cache") == folder
    assert not list((tmp_path / "cache").glob(".fetch-*"))
    assert os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"


def test_a_registry_of_no_kind_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"tracking = 'foo://host/x' has the unknown scheme 'foo'"):
        Registry("foo://me:secret@host/x", "shop", tmp_path)


def test_registering_the_same_bytes_twice_changes_nothing(registry, tmp_path):
    first = registered(registry, tmp_path)
    again = registry.register(record(round="r2"), tmp_path / "adapter-1.0", registry.start_run("r2/again"))
    assert again == first
    assert len(registry.versions(CAPABILITY)) == 1
    assert registered(registry, tmp_path, 2.0).version == "2"


def test_a_crash_between_finalize_and_register_is_repaired(registry, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "_create_version", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            registered(registry, tmp_path)
    assert registry.versions(CAPABILITY) == []
    left = registry.client.search_logged_models([registry.experiment_id])
    assert len(left) == 1
    adapter = registry.register(record(), tmp_path / "adapter-1.0", registry.start_run("r1/resumed"))
    assert adapter.model_id == left[0].model_id
    assert len(registry.client.search_logged_models([registry.experiment_id])) == 1
    assert registry.download(adapter, tmp_path / "cache").is_dir()


def test_steps_resume_and_are_stored_once(registry):
    run = registry.start_run("r1/cap/train", {"round": "r1"})
    steps = {step: {"reward": step / 10, "success": 0.0} for step in range(700)}
    assert registry.log_steps(run, dict(list(steps.items())[:300])) == 600
    registry.end_run(run, failed=True)
    assert registry.start_run("r1/cap/train") == run
    assert registry.log_steps(run, steps) == 800
    history = registry.client.get_metric_history(run, "reward")
    assert [m.step for m in history] == list(range(700))
    registry.end_run(run)
    assert registry.client.get_run(run).info.status == "FINISHED"


def test_evaluation_and_report_are_stored_where_people_look(registry, tmp_path):
    adapter = registered(registry, tmp_path)
    frame = pd.DataFrame({"task": ["a", "b"], "success": [1.0, 0.0]})
    registry.log_evaluation(adapter, frame, "validation-v1", {"eval/success_rate": 0.5})
    metrics = registry.client.get_logged_model(adapter.model_id).metrics
    assert [(m.key, m.value, m.dataset_name) for m in metrics] == [("eval/success_rate", 0.5, "validation-v1")]
    inputs = registry.client.get_run(adapter.run_id).inputs.dataset_inputs
    assert [i.dataset.name for i in inputs] == ["validation-v1"]
    put_on_version(registry, adapter, {"gate": "promoted"})
    assert registry.versions(CAPABILITY)[0].tags["gate"] == "promoted"
    registry.log_report(adapter.run_id, "<p>Berichtä</p>")
    assert [a.path for a in registry.client.list_artifacts(adapter.run_id)] == ["report.html"]


def test_the_champion_is_the_version_that_has_the_alias(registry, tmp_path):
    one, two = (registered(registry, tmp_path, value) for value in (1.0, 2.0))
    for adapter in (one, two, one):
        set_champion(registry, adapter.name, adapter.version)
        assert registry.champion(CAPABILITY) == adapter
        assert registry.champions() == {CAPABILITY: adapter}
    drop_champion(registry, one.name)
    assert registry.champions() == {}
    with pytest.raises(AdapterError, match=r"has no version 9 in sqlite:.*, though a release names it"):
        set_champion(registry, one.name, "9")


def test_champions_are_read_from_every_page_of_models(registry, tmp_path, monkeypatch):
    registered(registry, tmp_path)
    set_champion(registry, registry.model_name(CAPABILITY), "1")
    other = {f"trace-{registry.target}-{i}": {"target": f"{registry.target}-{i}"} for i in range(3)}
    for name, tags in other.items():  # sorted before it
        registry.client.create_registered_model(name, tags=tags)
    monkeypatch.setattr(registry_file, "_PAGE", 1)
    assert [m.name.rpartition("-")[2] for m in registry.models()] == ["0", "1", "2", CAPABILITY]
    assert list(registry.champions()) == [CAPABILITY]
    assert read_aliases(registry).champions == {registry.model_name(CAPABILITY): "1"}


def link(path: Path, target: Path) -> None:
    path.rename(target)
    path.symlink_to(target)


def test_only_the_two_files_are_an_adapter(registry, tmp_path):
    run = registry.start_run("r1/refused")
    for damage, message in (
        (lambda f: (f / "README.md").write_text("x"), "unexpected"),
        (lambda f: (f / "adapter_config.json").unlink(), "missing"),
        (lambda f: (f / "adapter_config.json").write_text('{"peft_type": "IA3"}'), "not a LoRA"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "not JSON"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x80\x04pickle"), "not a safetensors"),
        (lambda f: (f / "sub").mkdir(), "not a plain file"),
        (lambda f: link(f / "adapter_config.json", tmp_path / "c"), "is a link"),
    ):  # fmt: skip
        folder = adapter_folder(tmp_path / f"bad-{message.replace(' ', '-')}")
        damage(folder)
        with pytest.raises(AdapterError, match=message):
            registry.register(record(), folder, run)
    assert registry.versions(CAPABILITY) == []
    with pytest.raises(AdapterError, match="not a folder"):
        adapter_digest(tmp_path / "nowhere")


def test_a_peft_folder_is_exported_without_the_rest(tmp_path):
    torch = pytest.importorskip("torch")
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path / "peft")
    assert (tmp_path / "peft" / "README.md").exists()
    folder = export_adapter(tmp_path / "peft", tmp_path / "clean")
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with pytest.raises(AdapterError, match="exists"):
        export_adapter(tmp_path / "peft", tmp_path / "clean")


def test_the_order_in_which_modules_are_written_does_not_change_the_digest(tmp_path):
    digests = set()
    for order in (["q_proj", "v_proj"], ["v_proj", "q_proj"]):
        folder = adapter_folder(tmp_path / order[0])
        config = json.loads((folder / "adapter_config.json").read_text()) | {"target_modules": order}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        digests.add(adapter_digest(order_config(folder)))
    assert len(digests) == 1


def test_two_processes_that_fetch_the_same_adapter_both_get_it(registry, store, tmp_path, monkeypatch):
    adapter = registered(registry, tmp_path)
    both, plain = threading.Barrier(2), registry_file.verify

    def verify(folder: Path, adapter) -> None:
        plain(folder, adapter)
        if folder.name.startswith(".fetch-"):
            both.wait(20)  # both have fetched it, and neither has named it

    monkeypatch.setattr(registry_file, "verify", verify)
    with ThreadPoolExecutor(2) as pool:
        others = [Registry(store[0], registry.target, store[1]) for _ in range(2)]
        found = list(pool.map(lambda other: other.download(adapter, tmp_path / "cache"), others))
    assert found == [tmp_path / "cache" / adapter.served_name] * 2
    assert list((tmp_path / "cache").iterdir()) == found[:1]
    assert found[0].stat().st_mode & 0o777 == 0o755


def test_changed_bytes_are_refused_on_the_server_side_and_in_the_cache(registry, tmp_path):
    adapter = registered(registry, tmp_path)
    folder = registry.download(adapter, tmp_path / "cache")
    save_file({"layers.0.q_proj.lora_A.weight": np.zeros((4, 8), np.float32)}, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="files were changed"):
        registry.download(adapter, tmp_path / "cache")
    location = Path(registry.client.get_logged_model(adapter.model_id).artifact_location.removeprefix("file://"))
    config = location / "adapter_config.json"
    config.write_text(config.read_text().replace("tiny", "evil"))
    with pytest.raises(AdapterError, match="files were changed"):
        registry.download(adapter, tmp_path / "cache2")
    assert list((tmp_path / "cache2").iterdir()) == []
    (location / "extra.py").write_text("import os")
    with pytest.raises(AdapterError, match=r"unexpected \['extra.py'\]"):
        registry.download(adapter, tmp_path / "cache2")
    (location / "extra.py").unlink()
    config.unlink()
    config.symlink_to("/etc/hostname")
    with pytest.raises(AdapterError, match="through a"):
        registry.download(adapter, tmp_path / "cache2")


def test_sources_outside_the_artifact_root_are_refused(registry, tmp_path, store):
    adapter = registered(registry, tmp_path)
    elsewhere = Registry(store[0], registry.target, tmp_path / "another-root")
    with pytest.raises(AdapterError, match="outside the artifact root"):
        elsewhere.download(adapter, tmp_path / "cache")
    for source in ("/etc", "file:///etc", "http://127.0.0.1/x"):
        version = registry.client.create_model_version(adapter.name, source=source, tags={"sha256": adapter.sha256})
        with pytest.raises(AdapterError, match="not registered by this project"):
            registered_version(registry, CAPABILITY, version.version)


def test_relative_stores_and_odd_names_are_refused(tmp_path):
    for uri, root in (
        ("sqlite:///mlflow.db", tmp_path),
        ("./mlruns", tmp_path),
        (f"sqlite:///{tmp_path}/m.db", None),
        (f"sqlite:///{tmp_path}/m.db", Path("artifacts")),
    ):
        with pytest.raises(ConfigurationError):
            Registry(uri, "shop", root)
    registry = Registry(f"sqlite:///{tmp_path}/m.db", "shop", tmp_path)
    for name in ("../x", "a/b", "a'b", ""):
        with pytest.raises(ConfigurationError):
            registry.model_name(name)
    with pytest.raises(ConfigurationError):
        registry.start_run("x' OR 1=1")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{root}/m.db", "--artifacts-destination", str(root / "artifacts")]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (root / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.time() + 60
        while time.time() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    break
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.3)
        else:
            pytest.fail(f"mlflow server did not start: {(root / 'log').read_text()[-500:]}")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait(timeout=20)


@pytest.mark.integration
def test_the_same_over_a_server(server, tmp_path):
    registry = Registry(server, "shop")
    one = registered(registry, tmp_path, 1.0)
    two = registered(registry, tmp_path, 2.0)
    assert registered_again(registry, tmp_path) == two
    set_champion(registry, one.name, one.version)
    set_champion(registry, one.name, two.version)
    folder = registry.download(registry.champion(CAPABILITY), tmp_path / "cache")
    assert adapter_digest(folder) == two.sha256
    assert registered_version(registry, CAPABILITY, one.version) == one
    number = put_release(registry, "r1", {"number": "1"}, {"members": {}})
    assert put_release(registry, "r1", {"number": "1"}, {"members": {}}) == number == "1"
    set_live(registry, number)
    assert read_aliases(registry) == Aliases({two.name: two.version}, "r1")
    set_live(registry, None)
    drop_champion(registry, two.name)
    assert read_aliases(registry) == Aliases({}, None)
    with pytest.raises(AdapterError, match="has no version 9"):
        set_champion(registry, one.name, "9")
    registry.log_evaluation(one, pd.DataFrame({"a": [1.0]}), "validation", {"eval/success_rate": 0.25})
    assert registry.log_steps(one.run_id, {0: {"reward": 0.1}, 1: {"reward": 0.2}}) == 2
    registry.log_report(one.run_id, "<p>report</p>")
    log = RunLog(registry, one.run_id)
    log.table(pd.DataFrame({"task": ["a"], "success": [True]}), "test.json")
    log.metrics({"gate/points": 12.5}, one)
    log.traces([PlayedTrace("e", "episode", {"asked": "x"}, {}, (), {"reward": "1"}, "group", 10**18, 0.5)])
    (trace,) = registry.client.search_traces(locations=[registry.experiment_id], run_id=one.run_id)
    assert (trace.info.tags["reward"], trace.data.spans[0].inputs) == ("1", {"asked": "x"})
    assert registry.client.get_logged_model(one.model_id).metrics[-1].value == 12.5
    with urllib.request.urlopen(registry.link(one).split("#")[0], timeout=5) as page:
        assert page.status == 200


def registered_again(registry: Registry, tmp_path: Path):
    return registry.register(record(), tmp_path / "adapter-2.0", registry.start_run("r1/resend"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("asked http://anna:s3cret@mlflow:5000/api twice", "asked http://mlflow:5000/api twice"),
        ("postgresql://anna@example.org:s3cret@db/mlflow", "postgresql://db/mlflow"),
        ("postgresql+psycopg://mlflow:Zk9/s3cret@db:1/mlflow is away", "postgresql+psycopg://db:1/mlflow is away"),
        ("postgresql://db/mlflow?password=s3cret&sslmode=require", "postgresql://db/mlflow?password=&sslmode=require"),
        ("http://mlflow:5000/x@y and mail to a@b.org", "http://mlflow:5000/x@y and mail to a@b.org"),
    ],
)
def test_addresses_are_told_without_users_and_passwords(text: str, shown: str) -> None:
    assert without_password(text) == shown
