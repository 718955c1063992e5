"""What the formats mean, one number at a time. Slow on purpose.

`quantize.py` is the fast twin: the tests hold the two equal bit for bit.

    >>> from optimizer.formats import E4M3
    >>> round_to(E4M3, 1.0635)     # 1.0625 is a tie, and 1.0635 lies above it
    1.125
    >>> hex(encode(E4M3, 1.125))   # sign 0, exponent 7 (the bias), mantissa 1
    '0x39'
    >>> decode(E4M3, 0x39)
    1.125
"""

import math

from optimizer.formats import E4M3, Format


def round_to(fmt: Format, x: float) -> float:
    """Round `x` to the nearest number of `fmt`: ties to even, overflow saturates.

    NaN stays NaN; a negative that rounds to zero keeps its sign, except in formats
    without a negative zero. Raises ValueError as `encode_e8m0` does.
    """
    if math.isnan(x):
        return x
    if not fmt.signed:
        return decode_e8m0(encode_e8m0(x))
    clipped = min(abs(x), fmt.max)
    ulp = math.ldexp(1.0, _exponent(fmt, clipped) - fmt.mantissa_bits)
    rounded = round(clipped / ulp) * ulp  # Python's round() sends ties to even
    if rounded == 0 and not fmt.has_negative_zero:
        return 0.0
    return math.copysign(rounded, x)


def encode(fmt: Format, x: float) -> int:
    """Return the code (bit pattern) of `x` rounded to `fmt`.

    Raises ValueError for NaN where the format has no code for it (6 and 4 bits), and
    as `encode_e8m0` does.
    """
    if not fmt.signed:
        return encode_e8m0(x)
    if math.isnan(x):
        return _nan_code(fmt)
    rounded = round_to(fmt, x)
    if fmt.integer:
        return int(rounded) & ((1 << fmt.bits) - 1)
    exponent = _exponent(fmt, rounded)
    significand = int(math.ldexp(abs(rounded), fmt.mantissa_bits - exponent))
    # A normal significand has the implicit 1, which carries into the exponent field.
    magnitude = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + significand
    return magnitude | (_sign_bit(fmt) if math.copysign(1.0, rounded) < 0 else 0)


def decode(fmt: Format, code: int) -> float:
    """Return the number that `code` stands for: finite, inf or NaN."""
    if not fmt.signed:
        return decode_e8m0(code)
    if fmt.integer:
        return float(code - (1 << fmt.bits if code & _sign_bit(fmt) else 0))
    sign = -1.0 if code & _sign_bit(fmt) else 1.0
    if code == _sign_bit(fmt) and not fmt.has_negative_zero:
        return math.nan
    magnitude = code & (_sign_bit(fmt) - 1)
    exponent, fraction = divmod(magnitude, 1 << fmt.mantissa_bits)
    if exponent == 0:
        return sign * fraction * fmt.smallest_subnormal
    significand = (1 << fmt.mantissa_bits) + fraction
    value = significand * 2.0 ** (exponent - fmt.bias - fmt.mantissa_bits)
    if value <= fmt.max:
        return sign * value
    # The codes above the largest finite number are inf (fraction 0) or NaN.
    return sign * math.inf if fmt.has_inf and fraction == 0 else math.nan


def _exponent(fmt: Format, x: float) -> int:
    """Exponent of the binade of x; zero and subnormals share the lowest one."""
    return max(math.frexp(x)[1] - 1, fmt.min_exponent) if x else fmt.min_exponent


def _sign_bit(fmt: Format) -> int:
    return 1 << (fmt.bits - 1)


def _nan_code(fmt: Format) -> int:
    if fmt.integer:
        raise ValueError(f"{fmt.name} has no code for NaN")
    highest = _sign_bit(fmt) - 1
    code = highest if fmt.has_negative_zero else _sign_bit(fmt)
    if not math.isnan(decode(fmt, code)):
        raise ValueError(f"{fmt.name} has no code for NaN")
    return code


def decode_e8m0(code: int) -> float:
    """Return the power of two that an MX scale byte stands for; 255 is NaN."""
    return math.nan if code == 0xFF else 2.0 ** (code - 127)


def encode_e8m0(x: float) -> int:
    """Return the scale byte of the power of two nearest to `x`, the larger of two.

    Raises ValueError for what is not above zero: there is no code for it.
    """
    if math.isnan(x):
        return 0xFF
    if x <= 0:
        raise ValueError("e8m0 has no code for zero or for a negative number")
    if math.isinf(x):
        return 0xFE
    fraction, exponent = math.frexp(x)  # x = fraction · 2^exponent, from 0.5 below 1
    nearest = exponent if fraction >= 0.75 else exponent - 1
    return min(max(nearest + 127, 0), 0xFE)


def e8m0_floor_scale(amax: float, fmt: Format) -> float:
    """Return 2^(floor(log2 amax) - floor(log2 max)), the rule of OCP MX 1.0.

    An amax in the top of its binade exceeds `fmt.max` after division and saturates.
    """
    return 2.0 ** (math.frexp(amax)[1] - math.frexp(fmt.max)[1])


def e8m0_ceil_scale(amax: float, fmt: Format) -> float:
    """Return the smallest power of two under which `amax` does not saturate."""
    fraction, exponent = math.frexp(amax / fmt.max)
    return 2.0 ** (exponent - 1 if fraction == 0.5 else exponent)


def nv_block_scale(amax: float, tensor_scale: float, fmt: Format) -> float:
    """Return the e4m3 number that, times `tensor_scale`, scales a block of NVFP4.

    It is amax / fmt.max in units of the tensor's scale, rounded, and never zero: a
    block too small for e4m3 gets its smallest number. A block of zeros gets 1.
    """
    if amax == 0:
        return 1.0
    block = round_to(E4M3, amax / fmt.max / tensor_scale)
    return max(block, E4M3.smallest_subnormal)
