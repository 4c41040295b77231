"""The layout of the project: who may import whom, what a wheel holds, what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("trace", "decoders", "samplers", "viewers")

# A module may import from its own level and from those above it in this list.
LEVELS = [
    ["trace.model", "trace.semconv", "trace.printable", "trace.log", "trace.config", "trace.config_values"],
    ["decoders", "samplers", "trace.checks"],
    ["trace.capture", "trace.store"],
    ["trace.exporters", "trace.loggers", "trace.formats"],
    ["trace.lifecycle", "trace.testing", "trace.integrations", "viewers"],
    [
        "",
        "cli",
        "cli_json",
        "cli_options",
        "cli_output",
        "cli_prune",
        "cli_runs",
        "cli_ui",
        "cli_watch",
        "__main__",
        "demo",
    ],
]
HEAVY = {
    "attrs",
    "gguf",
    "mlflow",
    "numpy",
    "omegaconf",
    "pandas",
    "pydantic",
    "ray",
    "swanlab",
    "tensorboard",
    "textual",
    "tokenizers",
    "torch",
    "trackio",
    "transformers",
    "trl",
    "wandb",
    "weave",
}


def sources() -> dict[str, Path]:
    """Give every module of the package under its name without the leading `trackway.`."""
    found = {}
    for folder in FOLDERS:
        found.update({_name(path.relative_to(ROOT)): path for path in (ROOT / folder).rglob("*.py")})
    package = ROOT / "src" / "trackway"
    for path in [*package.glob("*.py"), *(package / "demo").rglob("*.py")]:
        found[_name(path.relative_to(package))] = path
    return found


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(name: str, path: Path) -> set[str]:
    """Give what a module imports from the package, and the top-level names it imports at import time."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            base += node.module.split(".") if node.module else []
            found |= (
                {".".join([*base, alias.name]) for alias in node.names}
                if not node.module
                else {".".join(base)}
            )
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "trackway":
            rest = node.module.partition(".")[2]
            found |= {rest} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.partition(".")[0] == "trackway"
            }
    return found


def level(name: str) -> int:
    best, length = -1, -1
    for number, names in enumerate(LEVELS):
        for prefix in names:
            if (name == prefix or (prefix and name.startswith(prefix + "."))) and len(prefix) > length:
                best, length = number, len(prefix)
    return best


def test_every_module_has_a_place_in_the_order_of_imports() -> None:
    lost = [name for name in sources() if level(name) < 0 and name != "trace"]
    assert lost == []


def test_no_module_imports_from_a_level_below_its_own() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, path in sources().items()
        for target in imports(name, path)
        if level(target) > level(name) and name != "trace"
    ]
    assert wrong == []


def test_decoders_samplers_and_viewers_never_import_capture() -> None:
    wrong = [
        name
        for name, path in sources().items()
        if name.partition(".")[0] in ("decoders", "samplers", "viewers")
        and any(target.startswith("trace.capture") for target in imports(name, path))
    ]
    assert wrong == []


def test_heavy_packages_are_imported_only_where_they_are_used() -> None:
    wrong = []
    for name, path in sources().items():
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            wrong += [f"{name} imports {item}" for item in names if item.partition(".")[0] in HEAVY]
    assert wrong == []


def clean_process(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_trackway_pulls_in_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import trackway; print(*sorted(set(sys.modules) - before))"
    loaded = {name.partition(".")[0] for name in clean_process(code, tmp_path).split()}
    assert "trackway" in loaded
    assert loaded & (HEAVY | {"opentelemetry", "rich", "typer", "yaml", "orjson", "sqlite3"}) == set()


def test_recording_pulls_in_no_destination(tmp_path: Path) -> None:
    code = (
        "import sys, trackway\n"
        "trackway.configure(store='s', backend='mlflow', sync='off')\n"
        "with trackway.trajectory(step=1, sample_index=1): pass\n"
        "trackway.flush(); trackway.shutdown()\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    assert set(clean_process(code, tmp_path).split()) & HEAVY == set()


def test_an_import_costs_a_fraction_of_what_python_itself_costs(tmp_path: Path) -> None:
    code = (
        "import time; start = time.perf_counter(); import json, asyncio, argparse\n"
        "base = time.perf_counter() - start\n"
        "start = time.perf_counter(); import trackway; print((time.perf_counter() - start) / base)"
    )
    ratios = sorted(float(clean_process(code, tmp_path)) for _ in range(5))
    assert ratios[2] < 2


def test_the_standard_library_keeps_its_trace_module(tmp_path: Path) -> None:
    code = "import trackway.trace.model, trace; print(trace.__file__); trace.Trace"
    for place in (tmp_path, ROOT / "tests"):
        assert Path(clean_process(code, place)).parent == Path(ast.__file__).parent


def test_public_names_are_all_there_and_no_others() -> None:
    import trackway

    assert {
        "configure",
        "rollout_trace",
        "llm_trace",
        "tool_trace",
        "trajectory",
        "reward",
        "annotate",
    } <= set(trackway.__all__)
    for name in trackway.__all__:
        assert getattr(trackway, name).__name__ == name
    assert dir(trackway) == trackway.__all__
    with pytest.raises(AttributeError, match="no attribute 'rollout_trce'"):
        trackway.rollout_trce  # noqa: B018


def modules_on_disk() -> set[str]:
    return {
        "trackway/" + (name.replace(".", "/") + "/" if name else "") + "__init__.py"
        if path.name == "__init__.py"
        else "trackway/" + name.replace(".", "/") + ".py"
        for name, path in sources().items()
    }


@pytest.mark.slow
def test_a_wheel_holds_the_four_folders_and_nothing_else(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", tmp_path, ROOT],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    code = {name for name in names if name.endswith(".py")}
    assert code == modules_on_disk()
    assert "trackway/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {
        "trackway",
        f"{wheel.name.split('-py3')[0]}.dist-info",
    }


@pytest.mark.slow
def test_an_sdist_builds_the_same_wheel(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", tmp_path / "tool", "build"],
        check=True,
    )
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", tmp_path / "out", ROOT],
        env={"PYTHONPATH": str(tmp_path / "tool"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        check=True,
        capture_output=True,
    )
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")} == modules_on_disk()
