"""Calls and imports that none of our code may have, looked for in its syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("data", "pipeline", "calib", "flows")

# Modules that execute code from what they read, or that run commands and open connections.
MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "jsonpickle", "joblib", "shelve"),
    *("marshal", "code", "codeop", "pty", "imp", "xmlrpc", "telnetlib", "lmdb"),
}
NAMES = {"eval", "exec", "compile", "__import__"}  # builtins
CALLS = {
    *("os.system", "os.popen", "os.execv", "os.execvp", "os.spawnl", "subprocess.getoutput"),
    *("subprocess.getstatusoutput", "yaml.load", "yaml.full_load", "yaml.unsafe_load"),
    *("shutil.unpack_archive", "pandas.read_pickle", "torch.hub.load", "runpy.run_path"),
    *("torch.load", "torch.save", "torch.jit.load", "torch.export.load"),
    *("open_clip.load_checkpoint", "open_clip.load_openai_model"),
    "open_clip.pretrained.download_pretrained_from_hf",
    *("logging.config.listen", "tempfile.mktemp"),
}
METHODS = {"extractall", "decode_pickle", "xdecode", "load_pickle", "from_pickle"}
KEYWORDS = {  # keyword: the constant that it must not have
    **{"shell": True, "trust_remote_code": True, "allow_pickle": True, "weights_only": False},
    **{"use_safetensors": False, "autoescape": False},
}
# Settings alone: tokenizers, configs, and a scheduler, whose class is looked up.
NO_WEIGHTS = {"tokenizer_class", "config_class", ""}
# Only functions that pass samples on: webdataset's readers unpickle, and run commands in URLs.
WDS = "wds"
WEBDATASET = {
    *("DataPipeline", "split_by_node", "split_by_worker", "shuffle"),
    *("FluidInterface", "pytorch_worker_info", "default_collation_fn"),
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def dotted(node: ast.expr) -> str:
    """A dotted name such as `torch.load` as text; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(tree: ast.Module) -> list[str]:
    """Line and reason of every node in a module that is not allowed."""
    violations = []
    for node in ast.walk(tree):
        reason = _unsafe(node)
        if reason:
            violations.append(f"{getattr(node, 'lineno', 0)}: {reason}")
    return violations


def _unsafe(node: ast.AST) -> str | None:
    if reason := _unsafe_of_webdataset(node):
        return reason
    if isinstance(node, ast.Import):
        names = {alias.name.partition(".")[0] for alias in node.names}
        return f"imports {names & MODULES}" if names & MODULES else None
    if isinstance(node, ast.ImportFrom):
        modules = {(node.module or "").partition(".")[0], *(alias.name for alias in node.names)}
        hidden = {f"{node.module}.{alias.name}" for alias in node.names} & CALLS
        return f"imports {modules & MODULES | hidden}" if modules & MODULES or hidden else None
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return "a shell in a URL" if node.value.startswith("pipe:") else None
    return _unsafe_call(node) if isinstance(node, ast.Call) else None


def _unsafe_of_webdataset(node: ast.AST) -> str | None:
    """Names of webdataset that are not allowed; it may be imported only as `wds`, or by names."""
    names = set[str]()
    if isinstance(node, ast.Import):
        names = {a.name for a in node.names if a.name.startswith("webdataset") and a.asname != WDS}
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("webdataset"):
        names = {alias.name for alias in node.names}
    if isinstance(node, ast.Attribute) and dotted(node.value) == WDS:
        names = {node.attr}
    return f"webdataset's {names - WEBDATASET}" if names - WEBDATASET else None


def _unsafe_call(call: ast.Call) -> str | None:
    name, keywords = dotted(call.func), {k.arg: k.value for k in call.keywords if k.arg}
    if name in NAMES | CALLS or name.rpartition(".")[2] in METHODS:
        return f"calls {name}"
    if name == "tarfile.open" and not _is(keywords.get("mode"), "w"):
        return "tarfile.open for reading"
    weights = name.endswith(".from_pretrained") and name.split(".")[-2] not in NO_WEIGHTS
    if weights and not _is(keywords.get("use_safetensors"), True):
        return f"{name} without use_safetensors=True"
    forbidden = [keyword for keyword, value in keywords.items() if _is_forbidden(keyword, value)]
    return f"{name}({', '.join(forbidden)}=...)" if forbidden else None


def _is_forbidden(keyword: str, node: ast.expr) -> bool:
    if keyword == "custom_pipeline":
        return True
    return keyword in KEYWORDS and _is(node, KEYWORDS[keyword])


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def test_nothing_of_ours_executes_what_it_reads():
    violations = [f"{path}:{line}" for path, tree in sources() for line in unsafe(tree)]
    assert violations == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import webdataset",
        "from webdataset import WebDataset",
        "wds.WebDataset(url)",
        "wds.tarfile_to_samples()",
        "from os import system",
        "eval('1')",
        "exec(text)",
        "__import__(name)",
        "os.system('x')",
        "os.popen('x')",
        "subprocess.run('ls', shell=True)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "from torch import load",
        "torch.save(state, file)",
        "torch.jit.load(path)",
        "from open_clip.pretrained import download_pretrained_from_hf",
        "np.load(path, allow_pickle=True)",
        "model.from_pretrained(name, use_safetensors=True, trust_remote_code=True)",
        "Pipeline.from_pretrained(name)",
        "Pipeline.from_pretrained(name, use_safetensors=False)",
        "Pipeline.from_pretrained(name, use_safetensors=True, custom_pipeline='x')",
        "tarfile.open(path)",
        "tarfile.open(path, mode='r|*')",
        "tar.extractall(folder)",
        "dataset.xdecode('pil')",
        "open_shard('pipe:curl x')",
        "Environment(autoescape=False)",
        "torch.hub.load('x', 'y')",
    ],
)
def test_the_check_sees_it(source):
    assert unsafe(ast.parse(source))


def test_the_check_lets_the_safe_way_pass():
    safe = "safetensors.torch.load_file(path)\nyaml.safe_load(text)\nmodel.eval()\n"
    safe += "Pipeline.from_pretrained(name, use_safetensors=True)\nsubprocess.run(['ls'])\n"
    safe += "import webdataset as wds\nwds.DataPipeline(wds.split_by_node)\n"
    assert unsafe(ast.parse(safe + "tarfile.open(fileobj=file, mode='w')\ntext.decode()")) == []
    assert len(list(sources())) > 100


def test_folders_are_removed_in_one_place():
    """`semix.data.files.remove_tree` does, and says how it treats links."""
    files = [
        path
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("rmtree", "removedirs")
    ]
    assert files == ["data/files.py"]


def test_all_that_is_printed_passes_one_door():
    """`data.printable`, or `flows.terminal` for people, so that no text steers a terminal."""
    names = {"print", "traceback.print_exc", "sys.stdout.write", "sys.stderr.write"}
    files = {
        path
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (dotted(node.func) in names or _prints(node))
    }
    assert files == {"data/printable.py", "flows/terminal.py"}


def _prints(call: ast.Call) -> bool:
    return dotted(call.func).endswith("accelerator.print")


def test_settings_hold_no_secret():
    """Settings are copied into plan.json, logs and reports."""
    words = ("password", "secret", "token", "credential", "api_key", "access_key")
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(dotted(b) == "Settings" for b in node.bases):
                fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]  # type: ignore[union-attr]
                secret_fields = [f for f in fields if any(word in f.lower() for word in words)]
                assert secret_fields == [], f"{path}: {node.name}"
