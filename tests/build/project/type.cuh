#pragma once
#if defined(CULA_IO_BF16)
using Element = __nv_bfloat16;
#elif defined(CULA_IO_FP32)
using Element = float;
#else
#error "no CULA_IO_*"
#endif
