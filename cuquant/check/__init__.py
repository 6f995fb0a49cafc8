"""Every check of an argument, and so every error: shapes, dtypes, devices, layouts, values.

Each function says what was given and what is allowed, before any work starts. TypeError is about what a
thing is, ValueError about the values and shapes it has, as in NumPy.
"""

from .attention import (
    MOST_QUERIES as MOST_QUERIES,
)
from .attention import (
    attention_mask as attention_mask,
)
from .attention import (
    kv_cache as kv_cache,
)
from .attention import (
    positions as positions,
)
from .attention import (
    queries as queries,
)
from .attention import (
    score_scale as score_scale,
)
from .caches import (
    ages as ages,
)
from .caches import (
    appended as appended,
)
from .caches import (
    average_bits as average_bits,
)
from .caches import (
    copied as copied,
)
from .caches import (
    fits as fits,
)
from .caches import (
    found as found,
)
from .caches import (
    head_dim as head_dim,
)
from .caches import (
    importance as importance,
)
from .caches import (
    in_cache as in_cache,
)
from .caches import (
    int32_on_gpu as int32_on_gpu,
)
from .caches import (
    key_scales as key_scales,
)
from .caches import (
    lengths as lengths,
)
from .caches import (
    lengths_on_gpu as lengths_on_gpu,
)
from .caches import (
    moved as moved,
)
from .caches import (
    named_tokens as named_tokens,
)
from .caches import (
    not_negative as not_negative,
)
from .caches import (
    on_gpu_integers as on_gpu_integers,
)
from .caches import (
    restored as restored,
)
from .caches import (
    rooms as rooms,
)
from .caches import (
    saved_ids as saved_ids,
)
from .caches import (
    sequence as sequence,
)
from .caches import (
    slot_range as slot_range,
)
from .caches import (
    token_bits as token_bits,
)
from .caches import (
    token_ids as token_ids,
)
from .caches import (
    tokens as tokens,
)
from .checkpoints import (
    exl3 as exl3,
)
from .checkpoints import (
    gptq_version as gptq_version,
)
from .checkpoints import (
    group_index as group_index,
)
from .checkpoints import (
    packed as packed,
)
from .common import (
    FLOAT_NAMES as FLOAT_NAMES,
)
from .common import (
    FLOATS as FLOATS,
)
from .common import (
    LARGEST_INDEX as LARGEST_INDEX,
)
from .common import (
    a_or_an as a_or_an,
)
from .common import (
    array as array,
)
from .common import (
    choice as choice,
)
from .common import (
    count as count,
)
from .common import (
    described as described,
)
from .common import (
    device_name as device_name,
)
from .common import (
    flag as flag,
)
from .common import (
    float_dtype as float_dtype,
)
from .common import (
    floats as floats,
)
from .common import (
    is_quantized as is_quantized,
)
from .common import (
    is_transposed as is_transposed,
)
from .common import (
    may_take_memory as may_take_memory,
)
from .common import (
    model_path as model_path,
)
from .common import (
    not_a_folder as not_a_folder,
)
from .common import (
    not_pickled as not_pickled,
)
from .common import (
    on_cpu as on_cpu,
)
from .common import (
    one_of as one_of,
)
from .common import (
    path as path,
)
from .common import (
    readable as readable,
)
from .common import (
    row_name as row_name,
)
from .common import (
    safetensors_path as safetensors_path,
)
from .common import (
    same_device as same_device,
)
from .common import (
    shape as shape,
)
from .common import (
    storage as storage,
)
from .common import (
    tensors as tensors,
)
from .common import (
    typed as typed,
)
from .formats import (
    codebook as codebook,
)
from .formats import (
    codes as codes,
)
from .formats import (
    column_importance as column_importance,
)
from .formats import (
    e4m4 as e4m4,
)
from .formats import (
    format_of as format_of,
)
from .formats import (
    grid as grid,
)
from .formats import (
    group_size as group_size,
)
from .formats import (
    hadamard_sides as hadamard_sides,
)
from .formats import (
    int4_parts as int4_parts,
)
from .formats import (
    kbit_matrix as kbit_matrix,
)
from .formats import (
    kbit_tiled as kbit_tiled,
)
from .formats import (
    moments as moments,
)
from .formats import (
    not_signs as not_signs,
)
from .formats import (
    of_kind as of_kind,
)
from .formats import (
    raw_blocks as raw_blocks,
)
from .formats import (
    runs_of_rows as runs_of_rows,
)
from .formats import (
    same_sides as same_sides,
)
from .formats import (
    same_signs as same_signs,
)
from .formats import (
    scales as scales,
)
from .formats import (
    signs as signs,
)
from .formats import (
    sound as sound,
)
from .formats import (
    tensor_scale as tensor_scale,
)
from .formats import (
    tile_sizes as tile_sizes,
)
from .formats import (
    to_quantize as to_quantize,
)
from .formats import (
    trellis_parts as trellis_parts,
)
from .formats import (
    trellis_scales as trellis_scales,
)
from .formats import (
    whole_blocks as whole_blocks,
)
from .products import (
    ACTIVATIONS as ACTIVATIONS,
)
from .products import (
    activation as activation,
)
from .products import (
    activation_format as activation_format,
)
from .products import (
    activations as activations,
)
from .products import (
    batch_axes as batch_axes,
)
from .products import (
    bias as bias,
)
from .products import (
    can_iterate as can_iterate,
)
from .products import (
    can_transpose as can_transpose,
)
from .products import (
    experts as experts,
)
from .products import (
    immutable as immutable,
)
from .products import (
    is_no_attribute as is_no_attribute,
)
from .products import (
    is_weight as is_weight,
)
from .products import (
    launch_size as launch_size,
)
from .products import (
    may_prepare as may_prepare,
)
from .products import (
    no_arithmetic as no_arithmetic,
)
from .products import (
    no_rows as no_rows,
)
from .products import (
    no_ufunc as no_ufunc,
)
from .products import (
    not_a_product as not_a_product,
)
from .products import (
    not_compared as not_compared,
)
from .products import (
    output as output,
)
from .products import (
    output_shape as output_shape,
)
from .products import (
    product_shape as product_shape,
)
from .products import (
    residual as residual,
)
from .products import (
    result_dtype as result_dtype,
)
from .products import (
    right_operand as right_operand,
)
from .products import (
    routing as routing,
)
from .products import (
    row_index as row_index,
)
from .products import (
    top_k as top_k,
)
from .products import (
    weights as weights,
)
