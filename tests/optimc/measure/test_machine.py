from dataclasses import replace

from optimc.measure.machine import read_machine

CPUINFO = """processor\t: 0
model name\t: Example CPU 9000 @ 2.00GHz
flags\t\t: fpu avx2 fma avx512f avx512_vnni made_up

processor\t: 1
model name\t: Another
"""


def fake_root(tmp_path, quota="200000 100000"):
    for name, text in {
        "proc/cpuinfo": CPUINFO,
        "proc/meminfo": "MemTotal:       16384000 kB\nMemFree: 5 kB\n",
        "sys/fs/cgroup/cpu.max": quota,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_reads_what_decides_speed(tmp_path):
    machine = read_machine(fake_root(tmp_path), {"OMP_NUM_THREADS": "2", "HOME": "/x"})
    assert machine.cpu == "Example CPU 9000 @ 2.00GHz"
    assert machine.isa == ("avx2", "fma", "avx512f", "avx512_vnni")
    assert machine.cpu_quota == 2.0
    assert machine.threads == "OMP_NUM_THREADS=2"
    assert machine.memory_bytes == round(16384000 * 1024 / 2**28) * 2**28


def test_no_limit_is_none(tmp_path):
    assert read_machine(fake_root(tmp_path, "max 100000"), {}).cpu_quota is None


def test_id_is_stable_and_tells_machines_apart(tmp_path):
    machine = read_machine(fake_root(tmp_path), {})
    assert machine.id == read_machine(tmp_path, {}).id
    assert machine.id != replace(machine, isa=("avx2",)).id
    assert machine.to_json()["id"] == machine.id


def test_a_system_without_proc_is_described_without_guesses(tmp_path):
    machine = read_machine(tmp_path, {})
    assert machine.isa == ()
    assert machine.memory_bytes == 0
    assert machine.cores >= 1
