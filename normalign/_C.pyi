version: str
cuda_build: str

def isa() -> str: ...
def best_isa() -> str: ...
def select_isa(name: str) -> bool: ...
def openmp() -> int: ...
def openmp_max_threads() -> int: ...
def orthogonal_projection_f32(
    rows: int,
    cols: int,
    g: int,
    g_stride: int,
    x: int,
    x_stride: int,
    r: int,
    r_stride: int,
    squared_norm: int,
    threads: int,
) -> None: ...
def orthogonal_projection_f64(
    rows: int,
    cols: int,
    g: int,
    g_stride: int,
    x: int,
    x_stride: int,
    r: int,
    r_stride: int,
    squared_norm: int,
    threads: int,
) -> None: ...
def elementary_f32(function: str, n: int, x: int, y: int) -> None: ...
def elementary_f64(function: str, n: int, x: int, y: int) -> None: ...

class GrokalignStackShape:
    def __init__(
        self,
        widths: list[int],
        has_bias: list[bool],
        activations: list[int],
        p0: list[float],
        p1: list[float],
        penalty: int,
    ) -> None: ...

class GrokalignStackStep_f32:
    def __init__(
        self,
        shape: GrokalignStackShape,
        batch: int,
        probes: int,
        threads: int,
        weights: list[int],
        biases: list[int],
        x: int,
        x_stride: int,
        probe: int,
        logits: int,
    ) -> None: ...
    def criterion(
        self, kind: int, target: int, ignore_index: int, penalty_weight: float
    ) -> None: ...
    def workspace(self) -> int: ...
    def forward(
        self, workspace: int, penalty: int, per_sample: bool, task: int, total: int
    ) -> None: ...
    def backward(
        self,
        grad_logits: int,
        grad_penalty: int,
        grad_total: int,
        grad_weights: list[int],
        grad_biases: list[int],
    ) -> None: ...

class GrokalignStackStep_f64(GrokalignStackStep_f32): ...
