"""A CUDA device without a GPU: tensors say cuda:0, the CPU computes, and devices may not mix.

A wrong device, which no CPU shows, raises here as on CUDA. The kernels are the CPU's, so results
equal a CPU's to the last bit. The device has a random generator of its own, which is seeded and
saved as a GPU's is. Not emulated: streams, memory and its limits, operations that CUDA lacks for
a dtype, kernels that round otherwise, generators on CUDA, a second GPU.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # it records torch's functions, so it comes before any is replaced
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.nn.parameter import Parameter
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
TRANSFERS = {"_to_copy", "to", "copy_", "type_as"}
# Their indices may lie on the CPU; their values only as numbers, see NUMBERS.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# Not tagged as pointwise, yet a CPU tensor without dimensions is a plain number to them.
NUMBERS = INDEXING | {"fill", "fill_", "masked_fill", "masked_fill_", "where"}
# Without gradients; run as one, since its steps make tensors where torch's C++ believes ours to be.
UNDIVIDED = ("one_hot",)
# Operations that autocast runs in half precision; those it runs in float32 are not emulated.
HALF_PRECISION = ("linear", "conv1d", "conv2d", "matmul", "mm", "addmm", "bmm", "baddbmm")


class CudaTensor(Tensor):
    """A tensor that says it is on cuda:0.

    Attributes:
        cpu_values: a plain CPU tensor of the same shape and strides.
    """

    cpu_values: Tensor
    # Disabled, or torch would not take its fast paths for plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, cpu_values: Tensor) -> "CudaTensor":
        # torch's C++ sees a meta tensor with the keys of CUDA: its autograd asks a driver for the
        # streams of CUDA tensors.
        with torch.inference_mode(cpu_values.is_inference()):  # a view's base decides
            shape = torch.empty_strided(
                cpu_values.size(), cpu_values.stride(), dtype=cpu_values.dtype, device="meta"
            )
            tensor = Tensor._make_subclass(cls, shape, device_for_backend_keys=CUDA)
        tensor.cpu_values = cpu_values
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_on_cpu(func, args, kwargs or {})

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return super().to(device, dtype or self.dtype, copy=copy, memory_format=layout)
        layout = layout or torch.preserve_format
        return super().to(dtype or self.dtype, copy=copy, memory_format=layout)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_index(index), value)

    def tolist(self) -> Any:
        return self.cpu_values.tolist()

    def data_ptr(self) -> int:
        return self.cpu_values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.cpu_values.untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied: Tensor = self.detach().clone().requires_grad_(self.requires_grad)
            is_parameter = isinstance(self, Parameter)
            memo[id(self)] = Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.cpu_values.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{self.cpu_values!r} on {CUDA}"


def _index(index: Any) -> Any:
    """An index with lists made tensors: torch's C++ would put them on the meta device."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return torch.tensor(index) if isinstance(index, list) else index


class _Dispatch(TorchDispatchMode):
    """Handles calls that create tensors on the device without taking one from it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_on_cpu(func, args, kwargs or {})


def _run_on_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU, after the checks that CUDA makes."""
    leaves = list(_leaves(args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    name = func.overloadpacket.__name__
    if any(tensor.device.type == "meta" for tensor in tensors):
        # Networks on the meta device; torch's C++ makes their scalars CudaTensors as well.
        args, kwargs = _scalars_on_meta(args), {k: _scalars_on_meta(v) for k, v in kwargs.items()}
        leaves = list(_leaves(args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    target = _target(name, leaves, tensors)
    if target != CUDA and CudaTensor not in map(type, tensors):
        return func(*args, **kwargs)
    if name not in TRANSFERS:
        _refuse_mixed(func, name, args, tensors)
    if target == CUDA and torch.Generator in map(type, leaves):
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    random = target == CUDA and torch.Tag.nondeterministic_seeded in func.tags
    with _device_generator() if random else nullcontext():
        out = func(*_on_cpu(args), **{key: _on_cpu(value) for key, value in kwargs.items()})
    if torch.Tag.inplace_view in func.tags:
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)  # changes the CudaTensor's own shape too
    inputs = {id(_on_cpu(tensor)): tensor for tensor in tensors}
    if isinstance(out, list | tuple):
        return type(out)([_on_device(value, target, inputs) for value in out])
    return _on_device(out, target, inputs)


def _leaves(args: Any, kwargs: Any) -> Iterator[Any]:
    """All arguments; of lists and tuples their items."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _on_cpu(value: Any) -> Any:
    """The value as the CPU's kernels take it."""
    if isinstance(value, CudaTensor):
        return value.cpu_values
    if isinstance(value, list | tuple):
        return type(value)(map(_on_cpu, value))
    return CPU if isinstance(value, torch.device) and value.type != "cpu" else value


def _scalars_on_meta(value: Any) -> Any:
    if isinstance(value, CudaTensor) and not value.dim():
        return value.cpu_values.to("meta")
    if isinstance(value, list | tuple):
        return type(value)(map(_scalars_on_meta, value))
    return value


def _target(name: str, leaves: list[Any], tensors: list[Tensor]) -> torch.device:
    """The device that the results belong on."""
    has_own = CudaTensor in map(type, tensors)
    if name == "copy_":
        return tensors[0].device
    devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    if devices:
        # torch's C++ passes our tensors' device on as meta, in calls with them and in these two.
        is_own = has_own or name == "scalar_tensor" or torch._C._current_graph_task_id() != -1
        return (
            CUDA
            if devices[0].type == "cuda" or (is_own and devices[0].type == "meta")
            else devices[0]
        )
    if name in ("to", "type_as") and len(tensors) == 2:
        return tensors[1].device
    return CUDA if has_own else CPU


def _refuse_mixed(func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
    assert not any(tensor.device.type == "meta" for tensor in tensors), f"{func} is not emulated"
    if name in INDEXING and isinstance(args[0], CudaTensor):
        tensors = [args[0], *(value for value in args[2:] if isinstance(value, Tensor))]
    pointwise = torch.Tag.pointwise in func.tags or name.startswith("_foreach")
    numbers = pointwise or name in NUMBERS
    devices = {tensor.device for tensor in tensors if tensor.dim() or not numbers}
    devices |= {tensor.device for tensor in tensors if isinstance(tensor, CudaTensor)}
    if len(devices) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(map(str, devices)))}! (in {func})"
        )


def _on_device(value: Any, target: torch.device, inputs: dict[int, Tensor]) -> Any:
    """A result on its device; an input that an operation returned stays the same object."""
    if isinstance(value, list):
        return [_on_device(item, target, inputs) for item in value]
    if not isinstance(value, Tensor):
        return value
    same_input = inputs.get(id(value))
    if same_input is None:
        return CudaTensor(value) if target == CUDA else value
    if same_input.device == target:
        return same_input
    return CudaTensor(value.clone()) if target == CUDA else value.clone()


@contextmanager
def _device_generator() -> Iterator[None]:
    """Make torch's default generator that of the device, within the block."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(_generator.get_state())
    try:
        yield
    finally:
        _generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


_generator = torch.Generator()


@contextmanager
def emulated_cuda() -> Iterator[None]:
    """Emulate one CUDA device within the block, for this thread."""
    torch._C._ensureCUDADeviceGuardSet()  # stays, and does nothing; torch's fake tensors need it
    with ExitStack() as stack:
        for owner, replaced in _replacements().items():
            for name, value in replaced.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes its values on the CPU
        # Parameters stay the same objects when their module moves, as on CUDA.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name in UNDIVIDED:
            operation = getattr(torch.ops.aten, name).default
            library.impl(name, partial(_run_undivided, operation), "AutogradCUDA")
        for name in HALF_PRECISION:
            operation = getattr(torch.ops.aten, name).default
            library.impl(name, partial(_in_half, operation), "AutocastCUDA", allow_override=True)
        for name, operation in COMPOSED.items():
            library.impl(name, operation, "AutogradCUDA")
        stack.enter_context(_Dispatch())
        yield


def _run_undivided(operation: Any, *args: Any, **kwargs: Any) -> Any:
    return _run_on_cpu(operation, args, kwargs)


def _in_half(operation: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("cuda")

    def half(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    with torch._C._ExcludeDispatchKeyGuard(without):
        return operation(*map(half, args), **{key: half(value) for key, value in kwargs.items()})


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that the CPU would choose: torch's own choice asks the driver."""
    options = {"attn_mask": attn_mask, "scale": scale}
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    choice = torch._fused_sdp_choice(*_on_cpu(arguments), scale=scale, enable_gqa=enable_gqa)
    if choice == SDPBackend.FLASH_ATTENTION.value:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            options["attn_mask"] = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                ~attn_mask, -torch.inf
            )
        fast = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fast(query, key, value, dropout_p, is_causal, **options)[0]
    return torch.ops.aten._scaled_dot_product_attention_math(
        *arguments, scale=scale, enable_gqa=enable_gqa
    )[0]


def _padded(
    sequences: list[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Tensor:
    """Pad without torch's C++, which would make a new tensor on the meta device."""
    assert padding_side == "right"
    longest = max(map(len, sequences))
    rows = [
        functional.pad(row, (*[0, 0] * (row.dim() - 1), 0, longest - len(row)), value=padding_value)
        for row in sequences
    ]
    return torch.stack(rows, dim=0 if batch_first else 1)


def _rms_norm(
    values: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The norm by plain operations: CUDA's fused one has no backward pass on the CPU."""
    wide, dims = values.float(), tuple(range(-len(shape), 0))
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    scaled = (wide * (wide.pow(2).mean(dims, keepdim=True) + eps).rsqrt()).type_as(values)
    return scaled if weight is None else scaled * weight


COMPOSED = {
    "scaled_dot_product_attention": _attention,
    "pad_sequence": _padded,
    "rms_norm": _rms_norm,
}


def _replacements() -> dict[Any, dict[str, Any]]:
    """Replacements for functions of torch that ask the driver, by their owner."""

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    def answer(value: Any) -> Any:
        return lambda *args, **kwargs: value

    properties = SimpleNamespace(
        name="emulated", major=9, minor=0, total_memory=2**34, multi_processor_count=1
    )
    cuda = {
        **{name: answer(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        **{name: answer(0) for name in ("current_device", "_exchange_device")},
        **{name: answer(0) for name in ("_maybe_exchange_device", "memory_allocated")},
        **{name: answer(0) for name in ("max_memory_allocated", "memory_reserved")},
        **dict.fromkeys(("_lazy_init", "init", "set_device", "synchronize"), nothing),
        **dict.fromkeys(("empty_cache", "ipc_collect", "reset_peak_memory_stats"), nothing),
        "device_count": answer(1),
        "get_device_name": answer(properties.name),
        "get_device_capability": answer((9, 0)),
        "get_device_properties": answer(properties),
        "mem_get_info": answer((2**34, 2**34)),
        "manual_seed": _generator.manual_seed,
        "manual_seed_all": _generator.manual_seed,
        "get_rng_state": lambda device="cuda": _generator.get_state(),
        "set_rng_state": lambda state, device="cuda": _generator.set_state(state),
        "get_rng_state_all": lambda: [_generator.get_state()],
        "set_rng_state_all": lambda states: _generator.set_state(states[0]),
    }
    plain_to = Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], CudaTensor):  # torch's C++ says it is on meta
            args = (CUDA, args[0].dtype, *args[1:])
        return plain_to(tensor, *args, **kwargs)

    def pin_memory(tensor: Tensor) -> Tensor:
        if isinstance(tensor, CudaTensor):
            raise RuntimeError("only dense CPU tensors can be pinned")
        return tensor.clone()

    kinds = [Tensor, Parameter, CudaTensor]  # on CUDA optimisers take their fast path for these
    return {
        torch.cuda: cuda,
        Tensor: {"to": to, "pin_memory": pin_memory},
        torch.accelerator: {"is_available": answer(True)},
        optimizer: {"_foreach_supported_types": kinds},
        _foreach_utils: {"_foreach_supported_types": kinds},
    }
