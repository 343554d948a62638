import ctypes
import subprocess
import sys

import pytest

from moe_jax.training import memory

HAS_MALLOPT = sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "mallopt")

# Page faults of touching 64 MiB a second time, after they were freed.
COUNT_FAULTS = """
import ctypes, resource
from moe_jax.training.memory import keep_freed_memory

if {keep}:
    assert keep_freed_memory() is True
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(1 << 26)))
    ctypes.memset(block, 1, 1 << 26)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


def count_faults(keep):
    # In a process of its own: the setting cannot be undone.
    program = COUNT_FAULTS.format(keep=keep)
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return int(process.stdout)


@pytest.mark.skipif(not HAS_MALLOPT, reason="needs glibc")
def test_freed_memory_is_not_mapped_anew():
    # 64 MiB are 16384 pages, or 32 of 2 MiB where the system joins pages.
    assert count_faults(keep=True) < 16 <= count_faults(keep=False)


def test_without_glibc_it_says_so(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert memory.keep_freed_memory() is False

    def fail(name):
        raise OSError(name)

    monkeypatch.setattr(memory.ctypes, "CDLL", fail)
    assert memory.keep_freed_memory() is False
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert memory.keep_freed_memory() is False


def test_refused_setting_is_reported(monkeypatch):
    class Refusing:
        @staticmethod
        def mallopt(name, value):
            return 0

    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Refusing)
    assert memory.keep_freed_memory() is False
