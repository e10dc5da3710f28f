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
