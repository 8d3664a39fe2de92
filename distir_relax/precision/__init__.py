"""Programs in another floating-point dtype, with inputs and outputs as the user's model has them; quantized weights."""

from distir_relax.precision.call_dtypes import with_call_dtypes
from distir_relax.precision.convert_program import convert_program
from distir_relax.precision.kept_weights import keep_weights
from distir_relax.precision.quantize_weights import WEIGHT_FORMATS, quantize_weights

__all__ = ["WEIGHT_FORMATS", "convert_program", "keep_weights", "quantize_weights", "with_call_dtypes"]
