// The io dtype of a kernel (its input tensors), fixed when it is compiled.
#pragma once

#include <cutlass/numeric_types.h>

namespace cula {

#if defined(CULA_IO_BF16)
using Io = cutlass::bfloat16_t;
#elif defined(CULA_IO_FP16)
using Io = cutlass::half_t;
#elif defined(CULA_IO_FP32)
using Io = float;
#else
#error "define CULA_IO_BF16, CULA_IO_FP16 or CULA_IO_FP32"
#endif

}  // namespace cula
