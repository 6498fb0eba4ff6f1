"""Linear layers that only compute: other memory layouts of a weight that nobody changes, for few rows at a time.

All are differentiable by what enters them, and take adapters, as the library's own layer does.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swarmd.compute.compiled import layout
from swarmd.compute.compiled.build import NotFused
from swarmd.compute.compiled.layout import GROUP, LEVEL_OF_ZERO, LEVELS
from swarmd.compute.hardware import packing
from swarmd.compute.hardware.device import free_memory_bytes
from swarmd.compute.hardware.packing import packed_rows
from swarmd.compute.linear.four_bits import in_4_bits

PACKED_FOR = 16  # rows: other numbers are computed as well
ROOM = 2.0  # free memory, times a weight in float32, for keeping what was unpacked
LIFT = 65_536.0  # FBGEMM takes no scale below 6e-5: a row of less than 0.016 would lose its last bits
FEW_ROWS = 24  # that int8's own kernel computes; for more, making plain numbers first is faster
LOOKED_AT = 4_096  # rows of a weight at a time: an embedding has many
FEW_ROWS_OF_4_BITS = 56  # which are more work to make numbers of


def has_bfloat16() -> bool:
    """Does this CPU multiply matrices in bfloat16? Others take nine times as long for it as in float32."""
    return bool(getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)())


def has_vnni() -> bool:
    """Does this CPU add up products of 8 bits in 32?"""
    return bool(getattr(torch.cpu, "_is_vnni_supported", bool)())


STORED = {
    torch.float32: layout.FLOAT32,
    torch.bfloat16: layout.BFLOAT16,
    torch.float16: layout.FLOAT16,
    torch.int8: layout.INT8,
    torch.uint8: layout.INT4,
}
"""How compiled code calls the types in which weights are stored."""


class FrozenLinear(nn.Module):
    """A layer whose weight nobody changes: hidden [..., in] to [..., out]."""

    in_features: int
    out_features: int
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear | FrozenLinear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers [out, in]: for gradients."""

    @abstractmethod
    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute without a gradient."""

    @property
    @abstractmethod
    def stored(self) -> torch.Tensor:
        """The weight as it was given, [out, in]: plain numbers, or quantised values of 8 or 4 bits as packed."""

    @property
    @abstractmethod
    def stored_dtype(self) -> torch.dtype:
        """The type of ``stored``, which some layers have to make anew."""

    def share(self, place: torch.Tensor) -> None:
        """Use the same weight that lies elsewhere from now on, where this layer can read it so."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute, with a gradient where one is asked for."""
        if torch.is_grad_enabled() and hidden.requires_grad:
            out: torch.Tensor = _Differentiated.apply(hidden, self)  # type: ignore[no-untyped-call]
            return out
        return self.compute(hidden)


class _Differentiated(torch.autograd.Function):
    """The layer, and the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: FrozenLinear) -> torch.Tensor:
        """Compute the layer; torch keeps no intermediate results, since the weight gets no gradient."""
        ctx.layer = layer
        return layer.compute(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Multiply with the weight as plain numbers: right for the weight that was read, exact or quantised."""
        return gradients[0] @ ctx.layer.weight.to(gradients[0].dtype), None


def in_pieces(
    hidden: torch.Tensor, n_out: int, at_once: int, compute: Callable[[torch.Tensor, torch.Tensor], None]
) -> torch.Tensor:
    """Compute hidden [..., in] to float32 [..., n_out]: ``compute`` gets so many rows at a time, and their output."""
    rows = hidden.detach().reshape(-1, hidden.shape[-1]).float().contiguous()
    out = torch.empty(len(rows), n_out)
    for begin in range(0, len(rows), at_once):
        end = begin + at_once
        compute(rows[begin:end], out[begin:end])
    return out.view(*hidden.shape[:-1], n_out)


def stored_weight(layer: Any) -> torch.Tensor:
    """Return the weight of a layer of torch's or of ours, as it was given."""
    return layer.stored if isinstance(layer, FrozenLinear) else layer.weight.detach()


def stored_dtype(layer: Any) -> torch.dtype:
    """Return the type of ``stored_weight``, without making it."""
    return layer.stored_dtype if isinstance(layer, FrozenLinear) else layer.weight.dtype


def rows_together(layer: Any) -> int:
    """Return how many rows of a weight are read at once; their number is a multiple of it. Raises NotFused."""
    if not isinstance(layer, FrozenLinear) and type(layer) is not nn.Linear:
        raise NotFused(f"a {type(layer).__name__} is no linear layer that is known here")
    return packing.rows_together() if stored_dtype(layer) == torch.uint8 else 2


def stored_scales(layer: Any) -> torch.Tensor:
    """Return a layer's scales as compiled code reads them: see ``layout``."""
    if isinstance(layer, Int4Linear):
        # [groups, out, 2] of torch's kernel to [out / rows, groups, 2, rows]: scales and zeros of rows read together.
        scales = layer.scales.detach()
        by_rows = scales.view(len(scales), -1, packing.rows_together(), 2)
        return by_rows.permute(1, 0, 3, 2).contiguous()
    if isinstance(layer, Int8Linear):
        return layer.scales.detach().float()
    scales = layer.stored_scales  # of another way to compute such a layer
    assert torch.is_tensor(scales)
    return scales


def share_weight(layer: Any, place: torch.Tensor) -> None:
    """Have a layer use the same weight that lies elsewhere."""
    if isinstance(layer, FrozenLinear):
        layer.share(place)
    else:
        layer.weight.data = place


class PackedOnce(FrozenLinear):
    """A weight that its kernel reads packed; unpacked, it is kept where there is room: some families read it often."""

    _kept_in: torch.dtype | None = None  # what loses nothing; None is the weight's own

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._dtype = linear.weight.dtype
        self._unpacked: torch.Tensor | None = None

    @abstractmethod
    def _unpack(self) -> torch.Tensor:
        """The weight as it was, to the bit."""

    @property
    def stored(self) -> torch.Tensor:
        return self._unpack()

    @property
    def stored_dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, to the bit."""
        if self._unpacked is not None:
            return self._unpacked.to(self._dtype)
        weight = self._unpack()
        if free_memory_bytes("cpu") > ROOM * weight.nbytes:
            self._unpacked = weight.to(self._kept_in or self._dtype)
        return weight


class PackedLinear(PackedOnce):
    """float32 or bfloat16 on a CPU, the weight in the blocks that oneDNN's kernels read."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR)

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute without a gradient."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return out

    def _unpack(self) -> torch.Tensor:
        weight: torch.Tensor = self._packed.to_dense()
        return weight


class HalfLinear(PackedOnce):
    """float32 or bfloat16 on a CPU, the weight kept in 16 bits (float16), by FBGEMM's kernel, which adds up in float32.

    For weights that lose nothing by it: those of nearly all checkpoints were written in 16 bits. Unpacking is slow.
    """

    _kept_in = torch.float16

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Is what each row of the weight would lose less than what float32 rounds?"""
        return is_exact_in_float16(linear.weight.detach())

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(hidden.float(), self._packed)
        out = out.to(hidden.dtype)
        return out if self.bias is None else out + self.bias

    def _unpack(self) -> torch.Tensor:
        weight: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return weight.to(self._dtype)


def exact_dtype(weight: torch.Tensor) -> torch.dtype:
    """Choose what a weight can be kept in to the bit: 16 bits, if it was written in them, or its own."""
    pieces = torch.split(weight.detach(), LOOKED_AT)
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(rows.to(dtype).to(rows.dtype), rows) for rows in pieces):
            return dtype
    return weight.dtype


def is_exact_in_float16(weight: torch.Tensor) -> bool:
    """Is what each row of a weight would lose in float16 less than what float32 rounds?"""
    pieces = (weight[begin : begin + LOOKED_AT] for begin in range(0, len(weight), LOOKED_AT))
    return all(_has_exact_rows(rows.float()) for rows in pieces)


def _has_exact_rows(rows: torch.Tensor) -> bool:
    """Does each of these rows lose less in float16 than what float32 rounds?"""
    errors = (rows.half().float() - rows).norm(dim=1)
    rounding = torch.finfo(torch.float32).eps / 2
    return bool((errors <= rounding * rows.norm(dim=1)).all())


class FewBitsLinear(FrozenLinear):
    """A weight in few bits; inputs and outputs are rounded to bfloat16."""

    quantised: nn.Parameter

    @abstractmethod
    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [n, in] to [n, out], both bfloat16, without the bias."""

    @property
    def stored(self) -> torch.Tensor:
        return self.quantised.detach()

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.quantised.dtype

    def share(self, place: torch.Tensor) -> None:
        self.quantised.data = place

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute without a gradient."""
        out = self._multiply(hidden.reshape(-1, self.in_features).bfloat16())
        out = out.to(hidden.dtype).view(*hidden.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class Int8Linear(FewBitsLinear):
    """8 bits a weight, one scale for each row; computed in bfloat16, whatever the input's type is.

    Decoding reads a quarter of what float32 takes: on CPUs by torch's own kernel, which is a plain loop for other types
    than bfloat16 (docs/performance.md, "Kernels"), on cards by ``cuda.products``. bitsandbytes' LLM.int8() is slower
    on a CPU than float32 is.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach()
        largest = weight.float().abs().amax(1)
        scales = (largest / LEVELS).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        scaled = weight.float() / scales.float()[:, None]
        rounded = scaled.round().clamp(-LEVELS, LEVELS)
        self.quantised = nn.Parameter(rounded.to(torch.int8), requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, bfloat16, made anew."""
        return self.quantised * self.scales[:, None]

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.is_cuda:
            from swarmd.compute.cuda import products  # late: Triton comes with torch where CUDA does

            return products.int8(rows, self.quantised, self.scales)
        if len(rows) > FEW_ROWS and has_bfloat16():
            return functional.linear(rows, self.quantised.bfloat16()) * self.scales
        if len(rows) > FEW_ROWS:
            out = functional.linear(rows.float(), self.quantised.float())
            return (out * self.scales).bfloat16()
        return torch._weight_int8pack_mm(rows.contiguous(), self.quantised, self.scales)


class DynamicInt8Linear(FrozenLinear):
    """8 bits a weight on a CPU, and 8 bits for inputs, with a scale and a zero for each row; by FBGEMM's kernel.

    Two to four times as fast as ``Int8Linear``. A row gives the same, whatever other rows a pass has.
    """

    def __init__(self, layer: Int8Linear) -> None:
        super().__init__(layer)
        scales = layer.scales.detach().double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantised tensors will leave torch some day, as its advice says
            weight = torch._make_per_channel_quantized_tensor(
                layer.quantised.detach(), scales, torch.zeros(self.out_features, dtype=torch.long), 0
            )
        self._packed = torch.ops.quantized.linear_prepack(weight, None)
        self.stored_scales = layer.scales.detach().float()
        self._sums = layer.quantised.detach().sum(1) * layer.scales.float()  # of each row of the weight

    @staticmethod
    def fits(layer: Int8Linear) -> bool:
        """Is this a layer that does not narrow, on a CPU with VNNI?

        The inputs of an MLP's last layer have outliers, which 8 bits do not stand; mostly it is a layer that narrows.
        Without VNNI the kernel adds pairs in 16 bits, which are too few.
        """
        return layer.out_features >= layer.in_features and has_vnni()

    @property
    def stored(self) -> torch.Tensor:
        """The quantised values [out, in], unpacked anew."""
        quantised: torch.Tensor = torch.ops.quantized.linear_unpack(self._packed)[0].int_repr()
        return quantised

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.int8

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, float32, made anew."""
        weight: torch.Tensor = torch.ops.quantized.linear_unpack(self._packed)[0].dequantize()
        return weight

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute without a gradient."""
        rows = hidden.reshape(-1, self.in_features).float()
        out = self._multiply_one(rows) if len(rows) == 1 else self._multiply(rows)
        out = out.to(hidden.dtype).view(*hidden.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def _multiply_one(self, row: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.quantized.linear_dynamic(row * LIFT, self._packed, False)
        return out * (1 / LIFT)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """Bring each row to values of 0 to 255 first, since the kernel has one scale and zero for all rows.

        x = scale * (value + zero), so W x = scale * (W value + zero * sum of W's row).
        """
        low, high = torch.aminmax(rows, dim=-1, keepdim=True)
        low = low.clamp(max=0.0)
        span = high.clamp(min=0.0) - low
        scales = (span / 255).clamp(min=torch.finfo(torch.float32).tiny)
        zeros = (low / scales).round()
        values = rows / scales - zeros
        out = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(values, 1.0, 0, self._packed)
        return torch.addcmul(out, zeros, self._sums) * scales


class Int4Linear(FewBitsLinear):
    """4 bits a weight on a CPU, each 32 of a row with a scale and a zero of their own; computed in bfloat16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        values, scales, zeros = in_4_bits(linear.weight.detach())
        packed = torch._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 1)
        by_groups = torch.stack([scales, zeros], -1).transpose(0, 1).contiguous()
        self.quantised = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(by_groups, requires_grad=False)

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Can torch's kernel take a weight of this shape?"""
        return linear.in_features % GROUP == 0 and linear.out_features % 16 == 0

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, bfloat16, made anew."""
        return self._multiply(torch.eye(self.in_features, dtype=torch.bfloat16)).t()

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        is_slow = len(rows) > FEW_ROWS_OF_4_BITS and not has_bfloat16()
        if is_slow and packed_rows() and self.out_features % packed_rows() == 0:
            return self._multiply_unpacked(rows.float()).bfloat16()
        return torch._weight_int4pack_mm_for_cpu(rows, self.quantised, GROUP, self.scales)

    def _multiply_unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [n, in] float32 as the kernel does: values times scales as numbers, zeros with sums of groups.

        W x = sum(scale * value * x) + (zero - LEVEL_OF_ZERO * scale) * sum(x), both for each group.
        """
        n_groups = self.in_features // GROUP
        half = packed_rows() // 2
        pairs = self.quantised.view(-1, self.in_features, half).transpose(0, 1)
        numbers = torch.empty(self.in_features, len(pairs[0]), 2, half)
        numbers[:, :, 0] = pairs & 15
        numbers[:, :, 1] = pairs >> 4
        scales, zeros = (column.float().contiguous() for column in self.scales.unbind(-1))
        numbers.view(n_groups, GROUP, -1).mul_(scales[:, None])
        sums = rows.view(-1, n_groups, GROUP).sum(-1)
        offsets = sums @ (zeros - LEVEL_OF_ZERO * scales)
        return torch.addmm(offsets, rows, numbers.view(self.in_features, -1))


class CudaInt4Linear(FewBitsLinear):
    """The numbers of ``Int4Linear`` in 4 bits on a card."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        values, scales, zeros = in_4_bits(linear.weight.detach())
        low, high = values.to(torch.uint8).chunk(2, 1)
        self.quantised = nn.Parameter(low | high << 4, requires_grad=False)
        self.scales = nn.Parameter(torch.stack([scales, zeros], -1), requires_grad=False)

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Do both halves of a row consist of groups?"""
        return linear.in_features % (2 * GROUP) == 0

    @property
    def weight(self) -> torch.Tensor:
        """The weight as plain numbers, bfloat16, made anew."""
        from swarmd.compute.cuda import products  # late: Triton comes with torch where CUDA does

        return products.int4_numbers(self.quantised, self.scales, torch.bfloat16)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        from swarmd.compute.cuda import products  # late: Triton comes with torch where CUDA does

        return products.int4(rows, self.quantised, self.scales)


def quantised(linear: nn.Linear, kind: str) -> FrozenLinear:
    """Quantise a layer to the bits of ``kind``; to int8 where 4 bits do not fit its shape."""
    int4_layer: type[Any] = CudaInt4Linear if linear.weight.is_cuda else Int4Linear
    return int4_layer(linear) if kind == "int4" and int4_layer.fits(linear) else Int8Linear(linear)


def layers(model: nn.Module, *kinds: type[nn.Module]) -> dict[str, Any]:
    """Find all layers of these very kinds that hold weights, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in kinds and any(parameter.numel() for parameter in module.parameters())
    }


def replace(
    model: nn.Module,
    make: Callable[[Any], nn.Module],
    *kinds: type[nn.Module],
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Replace all layers of these kinds, one by one; ``make`` may return the layer that it gets."""
    names = list(layers(model, *kinds))  # names only: each layer is freed as soon as there is another
    for n, name in enumerate(names):
        on_layer(n, len(names))
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, make(model.get_submodule(name)))
