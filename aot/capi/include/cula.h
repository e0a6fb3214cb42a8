/*
 * cula.h: C interface of libcula.so (C99), linear-attention kernels compiled ahead of time.
 *
 * Reading order: status codes, ops and archs, enums of the operators, args structs, the calls.
 *
 * Rules that hold for every function
 *   - Asynchronous on the given stream for GPU tensors; CPU tensors are done when the call returns.
 *   - cula_query, cula_bind and cula_run allocate nothing, synchronise nothing, load nothing and never read device
 *     data on the host: they are legal while a CUDA graph is captured. cula_prepare does all loading.
 *   - Thread-safe. The calling thread's current CUDA context is the same after a call as before it.
 *   - No pointer from an argument is kept past the call. The memory that a launch uses must stay valid until the stream
 *     has passed the launch.
 *   - No exception, printf, abort or exit crosses this interface.
 *
 * Rules for args structs
 *   - Write struct_size = CULA_SIZEOF(cula_xxx_args) first and set every other byte that is not used to zero (memset, or
 *     CULA_INIT): zero is the neutral value of every field. Fields are only ever appended. A larger struct than the
 *     library knows is accepted while its unknown tail is zero, else CULA_ERR_VERSION.
 *   - Tensors are const DLTensor*; NULL means absent. strides == NULL means compact row-major; a stride counts only where
 *     the extent is larger than 1. byte_offset is honoured. A tensor with no elements may have NULL data.
 *   - All tensors of a call live on one device: kDLCPU, or one kDLCUDA / kDLCUDAManaged device.
 */
#ifndef CULA_H_
#define CULA_H_

#include <stddef.h>
#include <stdint.h>

#include "dlpack.h"

#if defined(__GNUC__)
#define CULA_API __attribute__((visibility("default")))
#else
#define CULA_API
#endif

#ifdef __cplusplus
#define CULA_NOEXCEPT noexcept
extern "C" {
#else
#define CULA_NOEXCEPT
#endif

/* Version of this header. The ABI is compatible within one major version. */
#define CULA_VERSION_MAJOR 0
#define CULA_VERSION_MINOR 1
#define CULA_VERSION_PATCH 0
#define CULA_VERSION ((CULA_VERSION_MAJOR << 16) | (CULA_VERSION_MINOR << 8) | CULA_VERSION_PATCH)

/* ------------------------------------------------------------------------------------------------ status codes */

typedef int32_t cula_status;
enum {
  CULA_OK = 0,
  CULA_ERR_INVALID_ARGUMENT = 1, /* the caller's mistake: a wrong shape, dtype, stride, device, enum or pointer        */
  CULA_ERR_UNSUPPORTED = 2,      /* a valid request that no kernel in this library serves; the message lists what is built */
  CULA_ERR_NOT_FOUND = 3,        /* no such op, arch or kernel index                                                   */
  CULA_ERR_ARTIFACT = 4,         /* a cubin in this library does not load or does not fit its description              */
  CULA_ERR_VERSION = 5,          /* struct_size from another version                                                   */
  CULA_ERR_WORKSPACE = 6,        /* workspace missing, too small or misaligned; the message gives the needed size      */
  CULA_ERR_CUDA = 7,             /* the driver refused, or is not there; the message has its name and code             */
  CULA_ERR_OUT_OF_MEMORY = 8,
  CULA_ERR_INTERNAL = 9
};

/* ---------------------------------------------------------------------------------------------------- ops, archs */

typedef int32_t cula_op;
enum {
  CULA_OP_KDA_DECODE = 1,       /* cula_decode_args */
  CULA_OP_GDN_DECODE = 2,       /* cula_decode_args */
  CULA_OP_GLA_DECODE = 3,       /* cula_decode_args */
  CULA_OP_LIGHTNING_DECODE = 4, /* cula_decode_args */
  CULA_OP_KDA_PREFILL = 8,      /* cula_prefill_args */
  CULA_OP_KDA_GATE = 16,        /* cula_gate_args   */
  CULA_OP_GDN_GATE = 17,        /* cula_gate_args   */
  CULA_OP_L2NORM = 18           /* cula_l2norm_args */
};

typedef int32_t cula_arch;
enum {
  CULA_ARCH_DEVICE = 0, /* the arch of the tensors' own device */
  CULA_ARCH_CPU = 1,
  CULA_ARCH_SM90 = 90,
  CULA_ARCH_SM100 = 100,
  CULA_ARCH_SM103 = 103,
  CULA_ARCH_SM120 = 120
};

/* ---------------------------------------------------------------------------------------- enums of the operators */

/* What the tensor `gate` holds. g is the natural log of the decay, g <= 0; the decay is exp(g).
 *   kda_decode        NONE, LOG_CHANNEL, RAW
 *   kda_prefill       LOG_CHANNEL, RAW; here and below [B,T,HV,...] stands in the place of [N,HV,...]
 *   gdn_decode        NONE, LOG_HEAD, RAW
 *   gla_decode        NONE, LOG_CHANNEL
 *   lightning_decode  NONE, LOG_HEAD (simple GLA), CONST_HEAD
 */
typedef int32_t cula_gate_kind;
enum {
  CULA_GATE_NONE = 0,        /* no gate tensor, decay 1                                                            */
  CULA_GATE_LOG_HEAD = 1,    /* g [N,HV]: one decay a token and value head                                         */
  CULA_GATE_LOG_CHANNEL = 2, /* g [N,HV,K]: one decay a token, value head and key channel                          */
  CULA_GATE_RAW = 3,         /* before its activation; see cula_gate_args for the formulas. KDA [N,HV,K], GDN [N,HV] */
  CULA_GATE_CONST_HEAD = 4   /* lambda [HV] float32: the decay itself (not its log), in (0,1], the same for all rows */
};

typedef int32_t cula_beta_kind;
enum {
  CULA_BETA_VALUE = 0,     /* used as it is                      */
  CULA_BETA_LOGIT = 1,     /* sigmoid(beta)                      */
  CULA_BETA_LOGIT_TWICE = 2 /* 2 * sigmoid(beta), eigenvalues down to -1 (FLA: allow_neg_eigval) */
};

typedef int32_t cula_state_layout;
enum {
  CULA_STATE_VK = 0, /* [slots,HV,V,K], K contiguous ("v-first") */
  CULA_STATE_KV = 1  /* [slots,HV,K,V], V contiguous ("k-first") */
};

/* How a prefill is run. The result is the same within rounding; 0 is right unless a variant is to be tested or measured. */
typedef int32_t cula_prefill_variant;
enum {
  CULA_PREFILL_AUTO = 0,   /* the plan chooses from shapes and the number of multiprocessors      */
  CULA_PREFILL_SERIAL = 1, /* split: the record kernel, then the state kernel                     */
  CULA_PREFILL_OVERLAP = 2, /* split, side by side on every multiprocessor (programmatic launch)  */
  CULA_PREFILL_CHAIN = 3   /* as OVERLAP, and a segment waits for the state that the segment before hands on: more chains than multiprocessors */
};

/* ---------------------------------------------------------------------------------------------------- args structs */

/*
 * kda_decode, gdn_decode, gla_decode, lightning_decode: one token for each of N rows, states updated in place.
 *
 * With S [K,V] the float32 state of one row and value head, head h = hv / (HV/H), q^ = scale * q:
 *   delta ops (KDA, GDN)         S <- diag(exp g) S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q^
 *   others (GLA, Lightning)      S <- diag(exp g) S + k v^T;                                  o = S^T q^
 * (KDA: Kimi Linear, arXiv 2510.26692; GDN: Gated Delta Networks, arXiv 2412.06464; GLA: arXiv 2312.06635;
 * Lightning Attention-2: arXiv 2401.04658.)
 *
 * Rows of shape [N, ...] may also come as [N,1,...] (batch of one-token sequences) or [1,N,...] (one packed batch).
 * Row and head strides are free, in elements; the last stride of q, k, v, out, mixed_qkv and a per-channel gate is 1.
 *
 * Slots. read_index[n] is the slot that row n starts from, write_index[n] the slot that it stores to. A negative read starts
 * from a zero state; a negative write stores nothing. With has_null_slot, an index equal to null_slot counts as negative,
 * and so does, always, an index that is not below the number of slots: no index can reach memory outside the pool. A
 * row whose read and write are both negative is padding: its output is zero and no state is touched. read_index NULL: row n
 * reads slot n, and the pool has at least N slots. write_index NULL: the same slots as the reads. Without state every read
 * counts as negative and read_index must be NULL; without any pool the outputs are those of a zero state, and no row is padding.
 * Preconditions that are not checked: no slot is
 * written by two rows, and none is written by one row and read by another.
 *
 * Aliasing: state and state_out may be the same memory. out may not overlap any input, and no other overlap is allowed. What is
 * only read may have strides of zero or below (a broadcast beta); the elements of what is written must be distinct memory. Both
 * are checked; columns of one fused row and layers of one pool count as apart.
 *
 * Errors: INVALID_ARGUMENT for shapes, dtypes, strides, devices, missing or forbidden operands; UNSUPPORTED for a
 * combination of dtype and dims that is not built. N = 0 is CULA_OK and touches nothing.
 */
typedef struct cula_decode_args {
  size_t struct_size;
  /* io: bf16, fp16 or float32, one dtype for q, k, v, mixed_qkv and out */
  const DLTensor* q;         /* [N,H,K]                                                                    */
  const DLTensor* k;         /* [N,H,K]                                                                    */
  const DLTensor* v;         /* [N,HV,V], HV a multiple of H                                               */
  const DLTensor* mixed_qkv; /* [N, H*K + H*K + HV*V], instead of q, k and v; H follows from its length, with HV and V
                                of out and K of the states or of a per-channel gate, one of which must be there */
  const DLTensor* out;       /* [N,HV,V], written                                                          */
  const DLTensor* gate;      /* by gate_kind; float32, bf16 or fp16                                        */
  const DLTensor* A_log;     /* RAW only: HV elements of any shape; float32, bf16 or fp16; NULL: exp(A_log) = 1 */
  const DLTensor* dt_bias;   /* RAW only: KDA HV*K, GDN HV elements of any shape; NULL: 0                  */
  const DLTensor* beta;      /* delta ops only, required: [N,HV]; float32, bf16 or fp16                    */
  const DLTensor* state;     /* pool by state_layout, float32 or bf16; slot and head strides free, slots compact
                                inside a head; 16-byte aligned. NULL: every row starts from zero           */
  const DLTensor* state_out; /* pool that is written, dtype of state; NULL: state                          */
  const DLTensor* read_index;  /* [N] int32 or int64, on the device of the tensors */
  const DLTensor* write_index; /* [N] int32 or int64 */
  int64_t null_slot;         /* used only if has_null_slot                                                 */
  int32_t has_null_slot;     /* 0 or 1                                                                     */
  cula_gate_kind gate_kind;
  cula_beta_kind beta_kind;
  cula_state_layout state_layout;
  int32_t l2norm;            /* 1: q and k <- x / sqrt(sum x^2 + 1e-6), before the scale                   */
  int32_t has_scale;         /* 0: scale = K^-0.5, 1: the field scale, any finite value, 0 included        */
  float scale;
  float lower_bound;         /* RAW of KDA: 0 = softplus form, else in [-5,0): the sigmoid ("safe") form   */
  int32_t num_threads;       /* CPU tensors: most threads to use, 0 = as many as the process may run on, by its
                                affinity and CPU quota, or CULA_NUM_THREADS of the environment; GPU: 0 */
  int32_t reserved0;         /* 0 */
} cula_decode_args;

/*
 * kda_prefill: all tokens of N sequences. For token t in turn, with S [K,V] the float32 state of one sequence and value head, head
 * h = hv / (HV/H), q^ = scale * q:
 *   S <- diag(exp g_t) S;  u = beta_t (v_t - S^T k_t);  S <- S + k_t u^T;  o_t = S^T q^_t
 * computed in chunks (Kimi Linear, arXiv 2510.26692, section 3), every state accumulated in float32. On a GPU a chunk has 32 tokens and its
 * products have bf16 operands, for io fp16 too; on the CPU it has 16, and all arithmetic is float32.
 *
 * Sequences. Without cu_seqlens, sequence n is row n of the batch: N = B, T tokens each. With cu_seqlens B is 1 (or q, k, v, out, gate
 * and beta have no B at all: [T,H,K] and so on) and sequence n has the tokens cu_seqlens[n] to cu_seqlens[n+1]. cu_seqlens is never read on the
 * host, so that a captured graph may be replayed with other lengths. A sequence may be empty. Tokens of no sequence are not
 * read, and their rows of out are not written. Precondition, not checked: 0 <= cu_seqlens[n] <= cu_seqlens[n+1] <= T.
 *
 * Token and head strides are free, in elements; the last stride of q, k, v, out and the gate is 1. On a GPU rows of v and out must be
 * 16-byte aligned and rows of q, k and gate aligned to 4 elements, and so a float32 dt_bias, else UNSUPPORTED.
 *
 * Slots. Sequence n starts from slot read_index[n] of `state` and its final state goes to slot write_index[n] of `state_out`. An index
 * is void when it is negative, or not below the number of slots, or null_slot with has_null_slot: a void read starts from zero, a void
 * write stores nothing; the outputs are computed in either case. Without an index tensor sequence n has slot n, and the pool has at
 * least N slots; where read_index and state_out are given, write_index must be given too. state NULL: every sequence
 * starts from zero. state_out NULL: final states are not stored. An empty sequence copies its initial state.
 * Not checked: no slot is written by two sequences, and none is written by one and read by another.
 *
 * Checkpoints (for prefix caching): the state of sequence n after (j + 1) * checkpoint_interval of its tokens goes to slot
 * checkpoint_index[n][j] of `checkpoints`, for every j whose tokens exist; a void index stores nothing. Without cu_seqlens C must
 * be at least T / checkpoint_interval; with it, states of a sequence that has more than C intervals stop after the C-th.
 *
 * Aliasing: state_out may be the memory of state; checkpoints may be the memory of state_out or of state, with distinct slots (not
 * checked). out overlaps nothing, and no other overlap is allowed.
 *
 * Errors: as for decode. N = 0 is CULA_OK and touches nothing; with T = 0 every sequence is empty.
 */
typedef struct cula_prefill_args {
  size_t struct_size;
  /* io: bf16 or fp16 (CPU tensors: also float32), one dtype for q, k, v and out */
  const DLTensor* q;           /* [B,T,H,K] */
  const DLTensor* k;           /* [B,T,H,K] */
  const DLTensor* v;           /* [B,T,HV,V], HV a multiple of H */
  const DLTensor* out;         /* [B,T,HV,V], written */
  const DLTensor* gate;        /* [B,T,HV,K]; float32, bf16 or fp16 */
  const DLTensor* A_log;       /* RAW only: HV elements of any shape; float32, bf16 or fp16; NULL: exp(A_log) = 1 */
  const DLTensor* dt_bias;     /* RAW only: HV*K elements of any shape; NULL: 0 */
  const DLTensor* beta;        /* [B,T,HV]; float32, bf16 or fp16 */
  const DLTensor* cu_seqlens;  /* [N+1] int32 or int64, compact, on the device of the tensors; NULL: fixed batch */
  const DLTensor* state;       /* pool by state_layout as in cula_decode_args, float32 or bf16; read only unless it is state_out */
  const DLTensor* state_out;   /* pool that is written, dtype of state */
  const DLTensor* read_index;  /* [N] int32 or int64, compact; needs state */
  const DLTensor* write_index; /* [N] int32 or int64, compact; needs state_out */
  const DLTensor* checkpoints; /* pool that is written, dtype of state and state_out where these are given */
  const DLTensor* checkpoint_index; /* [N,C] int32 or int64, compact; given if and only if checkpoints is */
  int64_t null_slot;           /* used only if has_null_slot */
  int64_t checkpoint_interval; /* tokens, a positive multiple of 32; 0 without checkpoints */
  int32_t has_null_slot;       /* 0 or 1 */
  cula_gate_kind gate_kind;
  cula_beta_kind beta_kind;
  cula_state_layout state_layout;
  int32_t l2norm;              /* 1: q and k <- x / sqrt(sum x^2 + 1e-6), before the scale */
  int32_t has_scale;           /* 0: scale = K^-0.5, 1: the field scale, any finite value */
  float scale;
  float lower_bound;           /* RAW: 0 = softplus form, else in [-5,0): the sigmoid ("safe") form */
  cula_prefill_variant variant; /* CPU tensors: AUTO */
  int32_t segments;            /* parts that a sequence is cut into and that run at the same time (intra-card context parallelism):
                                  0 the plan chooses, 1 none, at most 64; CPU tensors: 0 or 1 */
  int32_t num_threads;         /* as in cula_decode_args */
  int32_t exact;               /* 0 or 1. A segment starts from the state that the tokens before it leave (1: always), or (0) up to 64
                                  tokens earlier from zero, where the device finds, per head, that ||dS_after / dS_before|| of those
                                  tokens is below 2^-32: a NaN or an infinity before them then does not reach the segment */
} cula_prefill_args;

/*
 * kda_gate, gdn_gate: raw gate -> log decay, and optionally beta logit -> beta, elementwise.
 *   kda_gate  x [T,HV,K] (or [B,T,HV,K]):  g = -exp(A_log[hv]) * softplus(x + dt_bias[hv,k])            lower_bound == 0
 *                                          g = lower_bound * sigmoid(exp(A_log[hv]) * (x + dt_bias[hv,k]))   lower_bound in [-5,0)
 *   gdn_gate  x [T,HV]   (or [B,T,HV]):    g = -exp(A_log[hv]) * softplus(x + dt_bias[hv])
 * softplus(y) = log(1 + exp y), y itself above 20. A_log NULL: exp(A_log) = 1. dt_bias NULL: 0.
 * Token and head strides are free, the last stride is 1. g may be the same memory as x when their dtypes and strides are equal.
 * (The FLA functions fused_kda_gate and fused_gdn_gate.)
 */
typedef struct cula_gate_args {
  size_t struct_size;
  const DLTensor* x;        /* float32, bf16 or fp16 */
  const DLTensor* g;        /* shape of x, written; float32, bf16 or fp16 */
  const DLTensor* A_log;    /* HV elements of any shape, or NULL */
  const DLTensor* dt_bias;  /* kda HV*K, gdn HV elements of any shape, or NULL */
  const DLTensor* beta;     /* [T,HV] or [B,T,HV]: logits; NULL: none */
  const DLTensor* beta_out; /* shape of beta, written; given if and only if beta is */
  cula_beta_kind beta_kind; /* LOGIT or LOGIT_TWICE with beta, else 0 */
  float lower_bound;        /* kda only */
  int32_t num_threads;      /* as in cula_decode_args */
  int32_t reserved0;        /* 0 */
} cula_gate_args;

/*
 * l2norm: y = x / sqrt(sum_d x_d^2 + eps) over the last dimension; x of rank 2 to 4, [..., D], D from 1 to 1024.
 * Leading strides are free, the last stride is 1. y may be x. (FLA: l2norm.)
 */
typedef struct cula_l2norm_args {
  size_t struct_size;
  const DLTensor* x;    /* float32, bf16 or fp16 */
  const DLTensor* y;    /* shape of x, written; float32, bf16 or fp16 */
  const DLTensor* rstd; /* shape of x without the last dimension, float32, compact, written; or NULL */
  float eps;            /* 0: 1e-6 */
  int32_t num_threads;  /* as in cula_decode_args */
} cula_l2norm_args;

/* Size of a struct up to and including its last field; plain sizeof could count padding that a later field takes. */
#define CULA_SIZEOF(T) (CULA_SIZEOF_##T)
#define CULA_SIZE_THROUGH(T, last) (offsetof(T, last) + sizeof(((T*)0)->last))
#define CULA_SIZEOF_cula_decode_args CULA_SIZE_THROUGH(cula_decode_args, reserved0)
#define CULA_SIZEOF_cula_prefill_args CULA_SIZE_THROUGH(cula_prefill_args, exact)
#define CULA_SIZEOF_cula_gate_args CULA_SIZE_THROUGH(cula_gate_args, reserved0)
#define CULA_SIZEOF_cula_l2norm_args CULA_SIZE_THROUGH(cula_l2norm_args, num_threads)
#define CULA_SIZEOF_cula_requirements CULA_SIZE_THROUGH(cula_requirements, kernels)
#define CULA_SIZEOF_cula_kernel_desc CULA_SIZE_THROUGH(cula_kernel_desc, smem_carveout)
#define CULA_SIZEOF_cula_launches CULA_SIZE_THROUGH(cula_launches, storage)

/* -------------------------------------------------------------------------------------------------- descriptions */

enum { CULA_MAX_LAUNCHES = 8, CULA_MAX_PARAMS = 64, CULA_PARAM_BYTES = 4096 };

typedef struct cula_requirements {
  size_t struct_size;
  cula_arch arch;           /* in: CULA_ARCH_DEVICE, or an arch to ask for without its GPU      */
  int32_t sm_count;         /* in: multiprocessors to plan for; 0: the device's, or the arch's usual count */
  size_t workspace_bytes;   /* out */
  size_t workspace_align;   /* out: a power of two, 1 if no workspace is needed */
  int32_t launch_count;     /* out: 0 when there is nothing to do */
  int32_t kernels[CULA_MAX_LAUNCHES]; /* out: kernel index of each launch, for cula_kernel_info; then -1 */
} cula_requirements;

/* One compiled kernel. The strings belong to the library and live as long as it is loaded. */
typedef struct cula_kernel_desc {
  size_t struct_size;
  const char* id;            /* for example kda_decode.sm90.bf16.sfp32.k128.vk, as in manifest.json */
  const char* entry_symbol;  /* GPU: name of the entry in its cubin; CPU: "" */
  const void* cubin;         /* GPU: the embedded image; CPU: NULL */
  size_t cubin_bytes;
  const uint16_t* param_sizes; /* bytes of each parameter */
  cula_op op;
  cula_arch arch;
  int32_t param_count;
  int32_t registers;
  int32_t static_smem;
  int32_t max_dynamic_smem;  /* largest dynamic shared memory that a plan asks for; above 48 KB it must be opted into */
  int32_t smem_carveout;     /* percent of a multiprocessor's memory to prefer as shared memory, as the driver's attribute of
                                functions takes it; 0: leave it. Without it kernels that fit side by side do not run so */
} cula_kernel_desc;

/* Bit-compatible with CUlaunchConfig of cuda.h (CUDA 12 and 13), so that a binding can hand its address to the driver. */
typedef struct cula_launch_config {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t dynamic_smem;
  void* stream;
  void* attributes;
  uint32_t attribute_count;
} cula_launch_config;

/* Bit-compatible with CUlaunchAttribute. */
typedef struct cula_launch_attribute {
  int32_t id;
  int32_t pad;
  union {
    char bytes[64];
    int32_t i32[16];
    uint32_t u32[16];
    uint64_t u64[8];
  } value;
} cula_launch_attribute;

typedef struct cula_launch {
  cula_launch_config config;
  void* params[CULA_MAX_PARAMS]; /* addresses of the parameters, inside cula_launches.storage */
  cula_launch_attribute attributes[2];
  int32_t kernel; /* index for cula_kernel_info */
  int32_t param_count;
} cula_launch;

/* What cula_bind fills: all that a driver call needs, with no pointer to anything but itself and device memory. Do not
 * copy it after the bind: it points into itself. About 10 KB, of which a bind touches what it uses: keep one a thread. */
typedef struct cula_launches {
  size_t struct_size;
  cula_arch arch;      /* in: as in cula_requirements */
  int32_t sm_count;    /* in: as in cula_requirements */
  void* stream;        /* in: CUstream to launch on */
  int32_t count;       /* out: 0 when there is nothing to do */
  int32_t device_type; /* out: DLDeviceType of the tensors */
  int32_t device_id;   /* out */
  int32_t storage_used; /* out */
  cula_launch launch[CULA_MAX_LAUNCHES];
  uint64_t storage[CULA_PARAM_BYTES / 8]; /* parameter values */
} cula_launches;

/* ------------------------------------------------------------------------------------------------------ the calls */

/* CULA_VERSION of the library. Check it first. */
CULA_API uint32_t cula_version(void) CULA_NOEXCEPT;

/* A JSON object: version, archs, kernel count, toolchain versions. Lives as long as the library. */
CULA_API const char* cula_build_info(void) CULA_NOEXCEPT;

/* "CULA_OK", ...; "CULA_ERR_UNKNOWN" for a number that is none. */
CULA_API const char* cula_status_name(cula_status status) CULA_NOEXCEPT;

/* "kda_decode", ...; NULL for a number that is none. */
CULA_API const char* cula_op_name(cula_op op) CULA_NOEXCEPT;

/* Copies the calling thread's message of its last failing call, zero-terminated and cut to n bytes; returns the length that
 * the whole message has. Successful calls leave it alone. */
CULA_API size_t cula_last_error(char* buffer, size_t n) CULA_NOEXCEPT;

CULA_API int32_t cula_kernel_count(void) CULA_NOEXCEPT;

/* Describes kernel `index` in [0, cula_kernel_count()). Set desc->struct_size first. */
CULA_API cula_status cula_kernel_info(int32_t index, cula_kernel_desc* desc) CULA_NOEXCEPT;

/* Validates args and says what they need. Needs no GPU when requirements->arch names an arch or the tensors are on the CPU;
 * tensor data is not looked at, only whether it is NULL. */
CULA_API cula_status cula_query(cula_op op, const void* args, cula_requirements* requirements) CULA_NOEXCEPT;

/* Loads every kernel of the device's arch into its primary context, or the current context if that is on the device.
 * Idempotent. device: CUDA ordinal. */
CULA_API cula_status cula_prepare(int32_t device) CULA_NOEXCEPT;

/* Validates, plans and launches. GPU: cula_prepare(device) must have been called, else CULA_ERR_INVALID_ARGUMENT. workspace: device memory (host memory for
 * CPU tensors) of at least the size and alignment that cula_query gives, NULL if that is 0. stream: CUstream, NULL: the
 * default stream; for CPU tensors NULL. */
CULA_API cula_status cula_run(cula_op op, const void* args, void* workspace, size_t workspace_bytes,
                              void* stream) CULA_NOEXCEPT;

/* Validates and plans like cula_run, but fills `launches` for another executor in place of launching. CPU tensors have no
 * launches: CULA_ERR_UNSUPPORTED, use cula_run. */
CULA_API cula_status cula_bind(cula_op op, const void* args, void* workspace, size_t workspace_bytes,
                               cula_launches* launches) CULA_NOEXCEPT;

/*
 * For Python bindings: reads up to CULA_MAX_OBJECTS objects through a DLPack exchange API (dlpack.h 1.3,
 * DLPackExchangeAPI: dltensor_from_py_object_no_sync and current_work_stream), stores the tensors' addresses in the args
 * struct and binds. Must be called with the GIL held. objects that are `none` leave their field NULL.
 *   field_offsets  byte offset in args of the const DLTensor* field of each object
 *   tensors        room for CULA_MAX_OBJECTS DLTensors, filled
 *   launches       stream: (void*)-1 on entry asks for the producer's current stream, which is stored there
 * A reader that fails leaves its Python exception set and the call returns CULA_ERR_INVALID_ARGUMENT. An API without
 * dltensor_from_py_object_no_sync (it may be NULL) is CULA_ERR_UNSUPPORTED: read the objects another way and call cula_bind.
 * CULA_ERR_WORKSPACE: args and launches->stream are filled, so cula_query says how much is needed, and cula_bind with it goes on from there.
 * CPU tensors (the first one decides): CULA_OK with device_type kDLCPU and count 0, and nothing is validated; call cula_run with
 * args and a NULL stream while the objects live, since their shapes are theirs. Nothing to do on a GPU is count 0 with device_type
 * kDLCUDA.
 */
enum { CULA_MAX_OBJECTS = 16 };
CULA_API cula_status cula_bind_objects(cula_op op, void* args, const void* exchange_api, const uint16_t* field_offsets,
                                       int32_t object_count, void* const* objects, void* none, DLTensor* tensors,
                                       void* workspace, size_t workspace_bytes, cula_launches* launches) CULA_NOEXCEPT;

/*
 * For XLA (JAX): handlers of its typed FFI (xla/ffi/api/c_api.h), API version 0.1 or later. Register cula_xla_cpu for the platform
 * "cpu"; for "CUDA" cula_xla_cuda as the stage `execute` and cula_xla_cuda_initialize as `initialize`, which calls cula_prepare
 * for the device that is about to run. Each serves every op. A custom call of them has three attributes
 *   op      s32: cula_op
 *   args    u8 array: the bytes of the op's args struct; its tensor fields are not looked at
 *   fields  s32 array: for each argument, then each result, the tensor field that it is, counted from 0 in the order of the struct
 * A result of -1 is the workspace: u8 of rank 1, with the bytes of cula_query; left out where none is needed. A result and no scratch
 * memory, because a command buffer is run again when that is long gone.
 * A field that is not named is absent. One that both an argument and a result name is updated in place, and the call must alias
 * the two (output_operand_aliases). Errors become XLA's, with the message of cula_last_error; a call launches on XLA's stream,
 * allocates and synchronises nothing, and may be recorded into a command buffer.
 */
struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;
CULA_API struct XLA_FFI_Error* cula_xla_cpu(struct XLA_FFI_CallFrame* frame) CULA_NOEXCEPT;
CULA_API struct XLA_FFI_Error* cula_xla_cuda(struct XLA_FFI_CallFrame* frame) CULA_NOEXCEPT;
CULA_API struct XLA_FFI_Error* cula_xla_cuda_initialize(struct XLA_FFI_CallFrame* frame) CULA_NOEXCEPT;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* CULA_H_ */
