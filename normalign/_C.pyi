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

panel: int

def laplace_pack_f32(
    n: int, width: int, x: int, ldx: int, scale: float, out: int, threads: int
) -> None: ...
def laplace_pack_f64(
    n: int, width: int, x: int, ldx: int, scale: float, out: int, threads: int
) -> None: ...
def laplace_gram_f32(
    kernel: int,
    exponent: float,
    weights: bool,
    m: int,
    n: int,
    width: int,
    x: int,
    z: int,
    out: int,
    ldo: int,
    threads: int,
) -> None: ...
def laplace_gram_f64(
    kernel: int,
    exponent: float,
    weights: bool,
    m: int,
    n: int,
    width: int,
    x: int,
    z: int,
    out: int,
    ldo: int,
    threads: int,
) -> None: ...
def laplace_gram_packed_f32(
    kernel: int,
    exponent: float,
    n: int,
    width: int,
    x: int,
    ridge: int,
    shift: float,
    packed: int,
    threads: int,
) -> None: ...
def laplace_gram_packed_f64(
    kernel: int,
    exponent: float,
    n: int,
    width: int,
    x: int,
    ridge: int,
    shift: float,
    packed: int,
    threads: int,
) -> None: ...
def laplace_matvec_f32(
    kernel: int,
    exponent: float,
    m: int,
    n: int,
    c: int,
    width: int,
    x: int,
    z: int,
    coef: int,
    ldc: int,
    out: int,
    ldo: int,
    workspace: int,
    threads: int,
) -> None: ...
def laplace_matvec_f64(
    kernel: int,
    exponent: float,
    m: int,
    n: int,
    c: int,
    width: int,
    x: int,
    z: int,
    coef: int,
    ldc: int,
    out: int,
    ldo: int,
    workspace: int,
    threads: int,
) -> None: ...
def laplace_matvec_symmetric_f32(
    kernel: int,
    exponent: float,
    n: int,
    c: int,
    width: int,
    x: int,
    coef: int,
    out: int,
    stride: int,
    workspace: int,
    threads: int,
) -> None: ...
def laplace_matvec_symmetric_f64(
    kernel: int,
    exponent: float,
    n: int,
    c: int,
    width: int,
    x: int,
    coef: int,
    out: int,
    stride: int,
    workspace: int,
    threads: int,
) -> None: ...
def cholesky_solve_f32(
    n: int, c: int, packed: int, inverse: int, rhs: int, stride: int
) -> None: ...
def cholesky_solve_f64(
    n: int, c: int, packed: int, inverse: int, rhs: int, stride: int
) -> None: ...
def agop_tiles_f32(
    kernel: int,
    exponent: float,
    n: int,
    c: int,
    width: int,
    panels: int,
    points: int,
    coef: int,
    ldc: int,
    weight: int,
    values: int,
    sums: int,
    block: int,
    r: int,
    threads: int,
) -> None: ...
def agop_tiles_f64(
    kernel: int,
    exponent: float,
    n: int,
    c: int,
    width: int,
    panels: int,
    points: int,
    coef: int,
    ldc: int,
    weight: int,
    values: int,
    sums: int,
    block: int,
    r: int,
    threads: int,
) -> None: ...
def agop_streamed_f32(
    kernel: int,
    exponent: float,
    m: int,
    n: int,
    c: int,
    width: int,
    x_panels: int,
    x: int,
    z_panels: int,
    z: int,
    coef: int,
    ldc: int,
    weight: int,
    values: int,
    sums: int,
    block: int,
    r: int,
    threads: int,
) -> None: ...
def agop_streamed_f64(
    kernel: int,
    exponent: float,
    m: int,
    n: int,
    c: int,
    width: int,
    x_panels: int,
    x: int,
    z_panels: int,
    z: int,
    coef: int,
    ldc: int,
    weight: int,
    values: int,
    sums: int,
    block: int,
    r: int,
    threads: int,
) -> None: ...
def agop_gram_f32(
    kernel: int,
    exponent: float,
    n: int,
    c: int,
    width: int,
    panels: int,
    points: int,
    coef: int,
    ldc: int,
    weight: int,
    w: int,
    lanes: int,
    padded_points: int,
    rows: int,
    r: int,
    threads: int,
) -> float: ...
def agop_gram_f64(
    kernel: int,
    exponent: float,
    n: int,
    c: int,
    width: int,
    panels: int,
    points: int,
    coef: int,
    ldc: int,
    weight: int,
    w: int,
    lanes: int,
    padded_points: int,
    rows: int,
    r: int,
    threads: int,
) -> float: ...
def cholesky_factor_f32(
    n: int, packed: int, inverse: int, threads: int
) -> tuple[int, float, float]: ...
def cholesky_factor_f64(
    n: int, packed: int, inverse: int, threads: int
) -> tuple[int, float, float]: ...
def rfam_project_f32(
    m: int,
    d: int,
    r: int,
    x: int,
    ldx: int,
    mean: int,
    factor: int,
    u: int,
    workspace: int,
    threads: int,
) -> None: ...
def rfam_project_f64(
    m: int,
    d: int,
    r: int,
    x: int,
    ldx: int,
    mean: int,
    factor: int,
    u: int,
    workspace: int,
    threads: int,
) -> None: ...
def rfam_gradient_f32(
    machine: tuple[object, ...],
    m: int,
    u: int,
    u_panels: int,
    cotangent: int,
    g: int,
    workspace: int,
    threads: int,
) -> None: ...
def rfam_gradient_f64(
    machine: tuple[object, ...],
    m: int,
    u: int,
    u_panels: int,
    cotangent: int,
    g: int,
    workspace: int,
    threads: int,
) -> None: ...
def rfam_attack_f32(
    machine: tuple[object, ...],
    loss: int,
    select: int,
    l2: bool,
    iterations: int,
    eps: int,
    step: int,
    eps_all: float,
    step_all: float,
    lower: int,
    upper: int,
    m: int,
    x: int,
    targets: int,
    current: int,
    value: int,
    outputs: int,
    zero_gradients: int,
    workspace: int,
    threads: int,
) -> None: ...
def rfam_attack_f64(
    machine: tuple[object, ...],
    loss: int,
    select: int,
    l2: bool,
    iterations: int,
    eps: int,
    step: int,
    eps_all: float,
    step_all: float,
    lower: int,
    upper: int,
    m: int,
    x: int,
    targets: int,
    current: int,
    value: int,
    outputs: int,
    zero_gradients: int,
    workspace: int,
    threads: int,
) -> None: ...
def cholesky_pack_f32(
    n: int, a: int, lda: int, shift: float, packed: int, threads: int
) -> None: ...
def cholesky_pack_f64(
    n: int, a: int, lda: int, shift: float, packed: int, threads: int
) -> None: ...
def rfam_attack_workspace(n: int, c: int, d: int, r: int) -> int: ...
def rfam_solve_f32(
    machine: tuple[object, ...],
    x: int,
    ldx: int,
    y: int,
    weight: int,
    reg: float,
    limits: tuple[float, float, float, float],
    refine: bool,
    u: int,
    panels: int,
    coef: int,
    workspace: int,
    threads: int,
) -> tuple[int, float, float]: ...
def rfam_solve_f64(
    machine: tuple[object, ...],
    x: int,
    ldx: int,
    y: int,
    weight: int,
    reg: float,
    limits: tuple[float, float, float, float],
    refine: bool,
    u: int,
    panels: int,
    coef: int,
    workspace: int,
    threads: int,
) -> tuple[int, float, float]: ...
def rfam_predict_f32(
    machine: tuple[object, ...],
    m: int,
    x: int,
    ldx: int,
    z_panels: int,
    coef: int,
    out: int,
    workspace: int,
    threads: int,
) -> None: ...
def rfam_predict_f64(
    machine: tuple[object, ...],
    m: int,
    x: int,
    ldx: int,
    z_panels: int,
    coef: int,
    out: int,
    workspace: int,
    threads: int,
) -> None: ...
def rfam_next_factor(
    d: int,
    r: int,
    factor: int,
    agop: int,
    tolerance: float,
    next: int,
    workspace: int,
) -> float | None: ...
def rfam_solve_workspace(
    n: int,
    d: int,
    r: int,
    c: int,
    threads: int,
    itemsize: int,
) -> int: ...
def rfam_predict_workspace(
    m: int,
    d: int,
    r: int,
    c: int,
    threads: int,
    itemsize: int,
) -> int: ...
