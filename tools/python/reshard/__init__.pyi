# SPDX-License-Identifier: Apache-2.0
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Optional, Union, overload

from numpy.typing import DTypeLike, NDArray

__version__: str

_Path = Union[str, os.PathLike[str]]
_Globs = Union[str, Iterable[str]]
_Mesh = Union[str, Mapping[str, int], Any]  # text, a dict or a torch DeviceMesh
_DType = Union[str, Any]  # "bfloat16", "bf16", torch.bfloat16, numpy.float32
_Framework = Literal["numpy", "np", "torch", "pt"]
_Device = Any  # "cpu", "cuda:0", a torch.device
_Renames = Union[Mapping[str, str], Iterable[str]]
_Bytes = Union[int, str]
_Progress = Union[bool, Callable[[int, int], Any], None]
_Key = Any
_Array = NDArray[Any]
# The formats that tensors are copied to.
_Format = Literal[
    "megatron-legacy", "megatron-legacy-local", "megatron", "dcp", "torch_checkpointing", "colossalai", "deepspeed-universal",
    "vllm", "vllm-0.13", "ranks", "orbax", "orbax-zarr2", "hf", "bin", "hdf5",
]

class Error(Exception):
    message: str
    path: Optional[str]
    tensor: Optional[str]
    offset: Optional[int]

class UsageError(Error, ValueError): ...
class CorruptError(Error): ...
class UnsupportedError(Error): ...
class FileError(Error, OSError): ...
class MissingError(FileError, FileNotFoundError): ...
class RankError(Error): ...
class InternalError(Error, RuntimeError): ...

class Piece(NamedTuple):
    file: str
    offset: int
    length: int
    origin: tuple[int, ...]
    shape: tuple[int, ...]
    copy: bool

class Tensor:
    name: str
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def placement(self) -> str: ...
    @property
    def pieces(self) -> list[Piece]: ...
    def numpy(self) -> _Array: ...
    def torch(self, key: _Key = ...) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: _Key) -> _Array: ...
    def __array__(self, dtype: Optional[DTypeLike] = None, copy: Optional[bool] = None) -> _Array: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Optional[tuple[int, int]] = None,
        dl_device: Optional[tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Slice:
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, key: Any) -> Any: ...

class Checkpoint(Mapping[str, Tensor]):
    path: str
    @property
    def format(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def mesh(self) -> dict[str, Optional[int]]: ...
    @property
    def objects(self) -> dict[str, str]: ...
    @property
    def warnings(self) -> list[str]: ...
    @property
    def nbytes(self) -> int: ...
    def __getitem__(self, name: str) -> Tensor: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def view(
        self,
        *,
        names: Optional[str] = None,
        config: Optional[_Path] = None,
        family: Optional[str] = None,
        family_file: Optional[_Path] = None,
        include: Optional[_Globs] = None,
        exclude: Optional[_Globs] = None,
        keep_unknown: bool = False,
    ) -> Checkpoint: ...
    def get_tensor(self, name: str) -> Any: ...
    def get_slice(self, name: str) -> Slice: ...
    def metadata(self) -> dict[str, str]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Checkpoint: ...
    def __exit__(self, *exception: Any) -> None: ...

def open(
    path: _Path,
    *,
    part: Optional[str] = None,
    strip_prefix: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    framework: Optional[_Framework] = None,
    device: _Device = None,
) -> Checkpoint: ...

class LoadReport:
    tensors: int
    bytes_read: int
    checksums: int
    digests: dict[str, str]
    warnings: list[str]

@overload
def load(
    path: _Path,
    *,
    into: None = None,
    mesh: Optional[_Mesh] = None,
    rank: Optional[int] = None,
    names: Optional[str] = None,
    layout: Optional[_Path] = None,
    dtype: Optional[_DType] = None,
    keep_dtype: Optional[_Globs] = None,
    include: Optional[_Globs] = None,
    exclude: Optional[_Globs] = None,
    part: Optional[str] = None,
    strict: bool = True,
    config: Optional[_Path] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    vocab_padding: Optional[str] = None,
    vocab_divisible_by: Optional[int] = None,
    keep_unknown: bool = False,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    check_whole_items: bool = False,
    framework: Optional[_Framework] = None,
    device: _Device = None,
    progress: _Progress = False,
) -> dict[str, _Array]: ...
@overload
def load(
    path: _Path,
    *,
    into: Any,  # a torch module, or a mapping of names to tensors
    mesh: Optional[_Mesh] = None,
    rank: Optional[int] = None,
    names: Optional[str] = None,
    layout: Optional[_Path] = None,
    dtype: Optional[_DType] = None,
    keep_dtype: Optional[_Globs] = None,
    include: Optional[_Globs] = None,
    exclude: Optional[_Globs] = None,
    part: Optional[str] = None,
    strict: bool = True,
    config: Optional[_Path] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    vocab_padding: Optional[str] = None,
    vocab_divisible_by: Optional[int] = None,
    keep_unknown: bool = False,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    check_whole_items: bool = False,
    framework: Optional[_Framework] = None,
    device: _Device = None,
    progress: _Progress = False,
) -> LoadReport: ...

class Finding:
    severity: Literal["error", "warning", "note"]
    id: str
    what: str
    why: list[str]
    tensors: list[str]
    lost: str
    advice: str

class Check:
    id: str
    title: str
    looked_at: int
    findings: int
    skipped: Optional[str]

class VerifyReport:
    ok: bool
    findings: list[Finding]
    checks: list[Check]
    seconds: float
    json: dict[str, Any]
    path: str
    format: str
    config: Optional[str]
    family: Optional[str]
    facts: dict[str, str]
    tensors: list[dict[str, Any]]
    files: list[dict[str, str]]
    def __bool__(self) -> bool: ...

class RankMemory:
    rank: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    total: int

class CheckReport:
    ok: bool
    findings: list[Finding]
    checks: list[Check]
    seconds: float
    json: dict[str, Any]
    config: str
    family: str
    mesh: dict[str, int]
    mesh_ranks: int
    parameters: int
    largest: Optional[RankMemory]
    smallest: Optional[RankMemory]
    tensors: list[dict[str, Any]]
    def __bool__(self) -> bool: ...

class ConversionPlan:
    source: str
    source_format: str
    target_format: str
    mesh: str
    family: Optional[str]
    tensors: int
    moves: int
    bytes_read: int
    bytes_written: int
    converted_tensors: int
    left_out: list[dict[str, Any]]
    files: list[dict[str, Any]]
    warnings: list[str]
    notes: list[str]
    json: dict[str, Any]
    layout: Optional[str]
    peak_memory: Optional[int]
    disk_free: Optional[int]

class Conversion(ConversionPlan):
    destination: str
    checksums: int
    digests: int
    source_digests: int
    seconds: float

class TensorView:
    source: str
    source_format: str
    target_format: str
    destination: str
    tensors: int
    refused: list[dict[str, str]]
    seconds: float

class TensorDifference:
    name: str
    shape: list[int]
    dtype_a: str
    dtype_b: str
    different_elements: int
    differs: bool
    max_abs: Optional[float]
    relative_l2: Optional[float]

class DiffReport:
    a: str
    b: str
    tolerance: float
    equal: bool
    structure: list[str]
    objects: list[str]
    not_compared: list[str]
    renamed: list[str]
    tensors: list[TensorDifference]
    json: dict[str, Any]
    def __bool__(self) -> bool: ...

class Inspection:
    path: str
    format: dict[str, str]
    complete: bool
    attributes: dict[str, str]
    files: dict[str, Any]
    mesh: dict[str, Any]
    parts: list[dict[str, Any]]
    state: dict[str, Any]
    objects: dict[str, Any]
    problems: list[str]
    warnings: list[str]
    notes: list[str]
    tensors: list[dict[str, Any]]
    json: dict[str, Any]

@overload
def convert(
    src: _Path,
    dst: _Path,
    *,
    to: Literal["hdf5-view"],
    names: Optional[str] = None,
    mesh: Optional[_Mesh] = None,
    layout: Optional[_Path] = None,
    dtype: Optional[_DType] = None,
    keep_dtype: Optional[_Globs] = None,
    quantize: Optional[Literal["fp8-block", "fp8-tensor", "mxfp4"]] = None,
    include: Optional[_Globs] = None,
    exclude: Optional[_Globs] = None,
    max_shard_size: Optional[_Bytes] = None,
    shard_format: Optional[Literal["safetensors", "bin"]] = None,
    strategy: Optional[Literal["auto", "direct", "exchange"]] = None,
    codec: Optional[str] = None,
    shuffle: Optional[bool] = None,
    allow: Optional[_Globs] = None,
    repair: Optional[_Globs] = None,
    donor: Optional[_Path] = None,
    vocab_divisible_by: Optional[int] = None,
    vocab_padding: Optional[Literal["zero", "repeat-last", "mean"]] = None,
    merge_adapter: bool = False,
    adapter: Optional[_Path] = None,
    lora_alpha: Optional[float] = None,
    keep_unknown: bool = False,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    part: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    config: Optional[_Path] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    device: Optional[str] = None,
    gpu_memory: Optional[_Bytes] = None,
    transport: Optional[str] = None,
    dry_run: bool = False,
    force: bool = False,
    resume: Optional[Literal["auto", "never", "require"]] = None,
    state: Optional[_Path] = None,
    progress: _Progress = False,
) -> TensorView: ...
@overload
def convert(
    src: _Path,
    dst: _Path,
    *,
    to: _Format,
    names: Optional[str] = None,
    mesh: Optional[_Mesh] = None,
    layout: Optional[_Path] = None,
    dtype: Optional[_DType] = None,
    keep_dtype: Optional[_Globs] = None,
    quantize: Optional[Literal["fp8-block", "fp8-tensor", "mxfp4"]] = None,
    include: Optional[_Globs] = None,
    exclude: Optional[_Globs] = None,
    max_shard_size: Optional[_Bytes] = None,
    shard_format: Optional[Literal["safetensors", "bin"]] = None,
    strategy: Optional[Literal["auto", "direct", "exchange"]] = None,
    codec: Optional[str] = None,
    shuffle: Optional[bool] = None,
    allow: Optional[_Globs] = None,
    repair: Optional[_Globs] = None,
    donor: Optional[_Path] = None,
    vocab_divisible_by: Optional[int] = None,
    vocab_padding: Optional[Literal["zero", "repeat-last", "mean"]] = None,
    merge_adapter: bool = False,
    adapter: Optional[_Path] = None,
    lora_alpha: Optional[float] = None,
    keep_unknown: bool = False,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    part: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    config: Optional[_Path] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    device: Optional[str] = None,
    gpu_memory: Optional[_Bytes] = None,
    transport: Optional[str] = None,
    dry_run: Literal[True],
    force: bool = False,
    resume: Optional[Literal["auto", "never", "require"]] = None,
    state: Optional[_Path] = None,
    progress: _Progress = False,
) -> ConversionPlan: ...
@overload
def convert(
    src: _Path,
    dst: _Path,
    *,
    to: _Format,
    names: Optional[str] = None,
    mesh: Optional[_Mesh] = None,
    layout: Optional[_Path] = None,
    dtype: Optional[_DType] = None,
    keep_dtype: Optional[_Globs] = None,
    quantize: Optional[Literal["fp8-block", "fp8-tensor", "mxfp4"]] = None,
    include: Optional[_Globs] = None,
    exclude: Optional[_Globs] = None,
    max_shard_size: Optional[_Bytes] = None,
    shard_format: Optional[Literal["safetensors", "bin"]] = None,
    strategy: Optional[Literal["auto", "direct", "exchange"]] = None,
    codec: Optional[str] = None,
    shuffle: Optional[bool] = None,
    allow: Optional[_Globs] = None,
    repair: Optional[_Globs] = None,
    donor: Optional[_Path] = None,
    vocab_divisible_by: Optional[int] = None,
    vocab_padding: Optional[Literal["zero", "repeat-last", "mean"]] = None,
    merge_adapter: bool = False,
    adapter: Optional[_Path] = None,
    lora_alpha: Optional[float] = None,
    keep_unknown: bool = False,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    part: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    config: Optional[_Path] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    device: Optional[str] = None,
    gpu_memory: Optional[_Bytes] = None,
    transport: Optional[str] = None,
    dry_run: Literal[False] = False,
    force: bool = False,
    resume: Optional[Literal["auto", "never", "require"]] = None,
    state: Optional[_Path] = None,
    progress: _Progress = False,
) -> Conversion: ...
@overload
def convert(
    src: _Path,
    dst: _Path,
    *,
    to: str,
    names: Optional[str] = None,
    mesh: Optional[_Mesh] = None,
    layout: Optional[_Path] = None,
    dtype: Optional[_DType] = None,
    keep_dtype: Optional[_Globs] = None,
    quantize: Optional[Literal["fp8-block", "fp8-tensor", "mxfp4"]] = None,
    include: Optional[_Globs] = None,
    exclude: Optional[_Globs] = None,
    max_shard_size: Optional[_Bytes] = None,
    shard_format: Optional[Literal["safetensors", "bin"]] = None,
    strategy: Optional[Literal["auto", "direct", "exchange"]] = None,
    codec: Optional[str] = None,
    shuffle: Optional[bool] = None,
    allow: Optional[_Globs] = None,
    repair: Optional[_Globs] = None,
    donor: Optional[_Path] = None,
    vocab_divisible_by: Optional[int] = None,
    vocab_padding: Optional[Literal["zero", "repeat-last", "mean"]] = None,
    merge_adapter: bool = False,
    adapter: Optional[_Path] = None,
    lora_alpha: Optional[float] = None,
    keep_unknown: bool = False,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    part: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    config: Optional[_Path] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    device: Optional[str] = None,
    gpu_memory: Optional[_Bytes] = None,
    transport: Optional[str] = None,
    dry_run: bool = False,
    force: bool = False,
    resume: Optional[Literal["auto", "never", "require"]] = None,
    state: Optional[_Path] = None,
    progress: _Progress = False,
) -> Union[Conversion, ConversionPlan, TensorView]: ...
def plan(
    src: _Path,
    dst: Optional[_Path] = None,
    *,
    to: str,
    names: Optional[str] = None,
    mesh: Optional[_Mesh] = None,
    layout: Optional[_Path] = None,
    dtype: Optional[_DType] = None,
    keep_dtype: Optional[_Globs] = None,
    quantize: Optional[Literal["fp8-block", "fp8-tensor", "mxfp4"]] = None,
    include: Optional[_Globs] = None,
    exclude: Optional[_Globs] = None,
    max_shard_size: Optional[_Bytes] = None,
    shard_format: Optional[Literal["safetensors", "bin"]] = None,
    strategy: Optional[Literal["auto", "direct", "exchange"]] = None,
    codec: Optional[str] = None,
    shuffle: Optional[bool] = None,
    allow: Optional[_Globs] = None,
    repair: Optional[_Globs] = None,
    donor: Optional[_Path] = None,
    vocab_divisible_by: Optional[int] = None,
    vocab_padding: Optional[Literal["zero", "repeat-last", "mean"]] = None,
    merge_adapter: bool = False,
    adapter: Optional[_Path] = None,
    lora_alpha: Optional[float] = None,
    keep_unknown: bool = False,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    part: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    config: Optional[_Path] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    device: Optional[str] = None,
    gpu_memory: Optional[_Bytes] = None,
    transport: Optional[str] = None,
    ranks: Optional[int] = None,
    ranks_per_machine: Optional[int] = None,
    html: Optional[_Path] = None,
) -> ConversionPlan: ...
def verify(
    path: _Path,
    *,
    config: Optional[_Path] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    layout: Optional[_Path] = None,
    mesh: Optional[_Mesh] = None,
    against: Optional[_Path] = None,
    bytes: bool = False,
    values: bool = False,
    replicas: bool = False,
    sha256: bool = False,
    lineage: bool = False,
    source: Optional[_Renames] = None,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    part: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    junit: Optional[_Path] = None,
    html: Optional[_Path] = None,
    fail_on: Optional[Literal["error", "warning", "note"]] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    device: Optional[str] = None,
    gpu_memory: Optional[_Bytes] = None,
    transport: Optional[str] = None,
    progress: _Progress = False,
) -> VerifyReport: ...
def check(
    config: _Path,
    *,
    mesh: _Mesh,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    world: Optional[int] = None,
    sequence: Optional[int] = None,
    dtype: Optional[_DType] = None,
    grad_dtype: Optional[_DType] = None,
    tensors: bool = False,
    junit: Optional[_Path] = None,
    html: Optional[_Path] = None,
    fail_on: Optional[Literal["error", "warning", "note"]] = None,
) -> CheckReport: ...
def diff(
    a: _Path,
    b: _Path,
    *,
    tolerance: Optional[float] = None,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    part: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    config: Optional[_Path] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    device: Optional[str] = None,
    gpu_memory: Optional[_Bytes] = None,
    transport: Optional[str] = None,
    html: Optional[_Path] = None,
    progress: _Progress = False,
) -> DiffReport: ...
def inspect(
    path: _Path,
    *,
    shards: bool = False,
    filter: Optional[_Globs] = None,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    part: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    html: Optional[_Path] = None,
) -> Inspection: ...
def merge(
    sources: Union[Iterable[_Path], Mapping[str, _Path]],
    dst: _Path,
    *,
    to: str,
    average: bool = False,
    weights: Union[str, Iterable[float], None] = None,
    ema: Optional[float] = None,
    expression: Optional[str] = None,
    accumulate: Optional[Literal["float32", "float64"]] = None,
    others_from: Optional[str] = None,
    names: Optional[str] = None,
    mesh: Optional[_Mesh] = None,
    layout: Optional[_Path] = None,
    dtype: Optional[_DType] = None,
    keep_dtype: Optional[_Globs] = None,
    include: Optional[_Globs] = None,
    exclude: Optional[_Globs] = None,
    max_shard_size: Optional[_Bytes] = None,
    shard_format: Optional[Literal["safetensors", "bin"]] = None,
    strategy: Optional[Literal["auto", "direct", "exchange"]] = None,
    codec: Optional[str] = None,
    shuffle: Optional[bool] = None,
    allow: Optional[_Globs] = None,
    repair: Optional[_Globs] = None,
    donor: Optional[_Path] = None,
    vocab_divisible_by: Optional[int] = None,
    vocab_padding: Optional[Literal["zero", "repeat-last", "mean"]] = None,
    keep_unknown: bool = False,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    strip_prefix: Optional[str] = None,
    part: Optional[str] = None,
    rename: Optional[_Renames] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    config: Optional[_Path] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    device: Optional[str] = None,
    gpu_memory: Optional[_Bytes] = None,
    transport: Optional[str] = None,
    dry_run: bool = False,
    force: bool = False,
    progress: _Progress = False,
) -> Union[Conversion, ConversionPlan]: ...
def latest(run: _Path) -> str: ...

class Family:
    name: str
    title: str
    model_types: list[str]
    conventions: list[str]

def families() -> list[Family]: ...
def synth(
    dst: _Path,
    *,
    model: Optional[str] = None,
    config: Optional[_Path] = None,
    to: Optional[str] = None,
    mesh: Optional[_Mesh] = None,
    names: Optional[str] = None,
    dtype: Optional[_DType] = None,
    layers: Optional[int] = None,
    optimizer: bool = False,
    metadata_only: bool = False,
    headers_only: bool = False,
    shape: Optional[_Renames] = None,
    without: Optional[_Globs] = None,
    force: bool = False,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
    device: Optional[str] = None,
    gpu_memory: Optional[_Bytes] = None,
    transport: Optional[str] = None,
) -> str: ...

class Mount:
    path: str
    def unmount(self) -> None: ...
    def __enter__(self) -> Mount: ...
    def __exit__(self, *exception: Any) -> None: ...

def mount(
    src: _Path,
    directory: _Path,
    *,
    to: str,
    names: Optional[str] = None,
    dtype: Optional[_DType] = None,
    keep_dtype: Optional[_Globs] = None,
    quantize: Optional[Literal["fp8-block", "fp8-tensor", "mxfp4"]] = None,
    include: Optional[_Globs] = None,
    exclude: Optional[_Globs] = None,
    max_shard_size: Optional[_Bytes] = None,
    config: Optional[_Path] = None,
    family: Optional[str] = None,
    family_file: Optional[_Path] = None,
    source_names: Optional[str] = None,
    part: Optional[str] = None,
    strip_prefix: Optional[str] = None,
    rename: Optional[_Renames] = None,
    weights: Optional[Literal["model", "master"]] = None,
    source_layout: Optional[_Path] = None,
    source_mesh: Optional[_Mesh] = None,
    allow: Optional[_Globs] = None,
    check: bool = False,
    log: Optional[_Path] = None,
    memory: Optional[_Bytes] = None,
    threads: Optional[int] = None,
) -> Mount: ...
