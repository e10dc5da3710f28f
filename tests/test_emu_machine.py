"""The machine that runs CUDA kernels on the host sees seeded mistakes, and invents none."""

import os
import pathlib
import platform
import shutil
import subprocess

import pytest
import torch

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "csrc" / "emu"
ORDERS = ("forward", "reverse", "random:1")
PARTS = ("machine", "collectives", "warp_matrix")
COMPILER = os.environ.get("CXX") or shutil.which("c++")

# What has to see the mistake: the machine itself or a wrong result in every order ("machine"),
# the address sanitizer ("address"), or the thread sanitizer ("thread").
SEEN_BY = {
    "neighbour": ("machine", "thread"),
    "reuse": ("machine", "thread"),
    "divergent": ("machine",),
    "two_barriers": ("machine",),
    "past_the_end": ("address",),
    "store_past_the_end": ("address",),
    "shared_bounds": ("address",),
    "dynamic_bounds": ("address",),
    "uninitialised": ("machine",),
    "lanes_left": ("machine",),
    "mask_without_caller": ("machine",),
    "masks_disagree": ("machine",),
    "warp_exchange": ("machine", "thread"),
    "accumulate": ("thread",),
    "blocks_overlap": ("thread",),
    "last_block": ("thread",),
    "too_much_shared": ("machine",),
    "matrix_lane_left": ("machine",),
    "matrix_diverged": ("machine",),
    "matrix_stride": ("machine",),
    "matrix_pitch": ("machine",),
    "matrix_alignment": ("machine",),
    "matrix_unrounded": ("machine",),
    "matrix_uninitialised": ("machine",),
    "matrix_no_barrier": ("machine", "thread"),
    "matrix_bounds": ("address",),
}

pytestmark = pytest.mark.skipif(
    COMPILER is None or platform.system() != "Linux", reason="needs a C++ compiler on Linux"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The seeded kernels: plain, and with each sanitizer that this compiler can link."""
    folder = tmp_path_factory.mktemp("seeded")
    flags = [COMPILER, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    kinds = {"machine": [], "address": ["-fsanitize=address,undefined"]}
    kinds["thread"] = ["-fsanitize=thread"]
    defines = {"machine": [], "address": ["-DNORMALIGN_EMU_ASAN"]}
    defines["thread"] = ["-DNORMALIGN_EMU_TSAN"]
    found = {}
    for kind, sanitize in kinds.items():
        program = folder / kind
        objects = [folder / f"{kind}_{part}.o" for part in PARTS]
        steps = (
            *(
                [*flags, *defines[kind], "-c", SOURCE / f"{part}.cpp", "-o", into]
                for part, into in zip(PARTS, objects, strict=True)
            ),
            [*flags, *sanitize, SOURCE / "seeded_bugs.cpp", *objects, "-o", program],
        )
        for step in steps:
            run = subprocess.run(step, capture_output=True, text=True)
            if run.returncode and kind != "machine":
                break  # a compiler without this sanitizer
            assert run.returncode == 0, run.stderr
        else:
            found[kind] = program
    return found


def _run(program, kernel, variant, order="forward"):
    env = {
        **os.environ,
        "NORMALIGN_EMU_ORDER": order,
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
        "UBSAN_OPTIONS": "halt_on_error=1:exitcode=66",
    }
    # The thread sanitizer's address map does not fit every randomised layout.
    fixed = ["setarch", "-R"] if program.name == "thread" and shutil.which("setarch") else []
    run = subprocess.run(
        [*fixed, program, kernel, variant], env=env, capture_output=True, text=True, timeout=60
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.parametrize("kernel", SEEN_BY)
def test_right_kernels_are_clean(programs, kernel):
    for kind, program in programs.items():
        for order in ORDERS if kind == "machine" else ORDERS[:1]:
            status, text = _run(program, kernel, "good", order)
            assert status == 0, f"{kind}, {order}: {text}"


@pytest.mark.parametrize("kernel", SEEN_BY)
def test_seeded_mistakes_are_seen(programs, kernel):
    for kind in SEEN_BY[kernel]:
        if kind not in programs:
            pytest.skip(f"the compiler has no {kind} sanitizer")
        for order in ORDERS if kind == "machine" else ORDERS[:1]:
            status, text = _run(programs[kind], kernel, "bad", order)
            expected = (1, 3) if kind == "machine" else (66,)
            assert status in expected, f"{kind}, {order}: {status} {text}"


def test_a_report_says_where(programs):
    status, text = _run(programs["machine"], "divergent", "bad")
    assert status == 3
    assert "barrier" in text
    assert "seeded_bugs.cpp:" in text
    assert "block (0,0,0)" in text


def test_rounding_to_tf32_and_bf16(programs):
    """Bit for bit: bf16 against torch's, tf32 against the definition in float64."""
    special = [0x0, 0x1, 0x1000, 0x1001, 0x7FFFFF, 0x7F7FFFFF, 0x7F7FEFFF, 0x7F7FF000, 0x7F800000]
    ties = [0x3F801000, 0x3F800FFF, 0x3F803000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x7FC12345]
    bits = torch.randint(-(2**31), 2**31, (3000,)).to(torch.int32)
    ends = torch.tensor([(b | sign << 31) for b in special + ties for sign in (0, 1)])
    bits = torch.cat([bits, ends.to(torch.int32)])
    text = " ".join(f"{b & 0xFFFFFFFF:x}" for b in bits.tolist())
    run = subprocess.run(
        [programs["machine"], "rounding"], input=text, capture_output=True, text=True, check=True
    )
    tf32, bf16 = zip(*(line.split() for line in run.stdout.splitlines()), strict=True)
    value = bits.view(torch.float32)
    as_bf16 = torch.tensor([int(b, 16) for b in bf16]).to(torch.int16).view(torch.bfloat16)
    torch.testing.assert_close(as_bf16, value.bfloat16(), rtol=0, atol=0, equal_nan=True)
    got = torch.tensor([int(b, 16) for b in tf32]).to(torch.int32).view(torch.float32)
    exponent = torch.frexp(value.double().abs()).exponent.clamp(min=-125)
    unit = torch.exp2(exponent.double() - 11)  # 10 bits after the first; denormals have fewer
    exact = torch.floor(value.double().abs() / unit + 0.5) * unit
    expected = exact.copysign(value.double()).float()  # beyond the largest: infinity
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() | got.isnan(), value.signbit() | value.isnan())


def test_unknown_order_is_refused(programs):
    status, text = _run(programs["machine"], "neighbour", "good", "sideways")
    assert status == 3
    assert "NORMALIGN_EMU_ORDER must be forward, reverse, random or random:SEED" in text
