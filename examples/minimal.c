/*
 * The smallest cula program: one KDA decode step on the CPU, C99.
 *
 *   cc -std=c99 minimal.c $(pkg-config --cflags --libs cula) -Wl,-rpath,$(pkg-config --variable=libdir cula) -o minimal
 *
 * One row, one head, K = V = 64, no gate. From a zero state (read_index -1) the delta rule gives S = beta k v^T, so
 * o = scale * beta * (q . k) * v, which the program compares with what the library wrote.
 */
#include <cula.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { K = 64, V = 64 };

static DLTensor tensor(void* data, DLDataTypeCode code, int bits, int ndim, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t); /* strides NULL: compact */
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = (uint8_t)code;
  t.dtype.bits = (uint8_t)bits;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

int main(void) {
  float q[K], k[K], v[V], out[V], beta = 0.5f;
  static float pool[V * K]; /* one slot, one head, v-first */
  int32_t read_slot = -1, write_slot = 0;
  double qk = 0.0;
  int i, wrong = 0;
  for (i = 0; i < K; ++i) {
    q[i] = 0.01f * (float)(i - 20);
    k[i] = 0.02f * (float)(40 - i);
    v[i] = 0.125f * (float)(i % 7 - 3);
    qk += (double)q[i] * (double)k[i];
  }

  int64_t qk_shape[3] = {1, 1, K}, v_shape[3] = {1, 1, V}, beta_shape[2] = {1, 1}, row_shape[1] = {1};
  int64_t pool_shape[4] = {1, 1, V, K};
  DLTensor tq = tensor(q, kDLFloat, 32, 3, qk_shape), tk = tensor(k, kDLFloat, 32, 3, qk_shape);
  DLTensor tv = tensor(v, kDLFloat, 32, 3, v_shape), tout = tensor(out, kDLFloat, 32, 3, v_shape);
  DLTensor tbeta = tensor(&beta, kDLFloat, 32, 2, beta_shape), tpool = tensor(pool, kDLFloat, 32, 4, pool_shape);
  DLTensor tread = tensor(&read_slot, kDLInt, 32, 1, row_shape), twrite = tensor(&write_slot, kDLInt, 32, 1, row_shape);

  cula_decode_args args;
  memset(&args, 0, sizeof args); /* zero is the neutral value of every field */
  args.struct_size = CULA_SIZEOF(cula_decode_args);
  args.q = &tq;
  args.k = &tk;
  args.v = &tv;
  args.out = &tout;
  args.beta = &tbeta;
  args.state = &tpool;
  args.read_index = &tread;
  args.write_index = &twrite;

  cula_status status = cula_run(CULA_OP_KDA_DECODE, &args, NULL, 0, NULL);
  if (status != CULA_OK) {
    char message[1024];
    cula_last_error(message, sizeof message);
    fprintf(stderr, "%s: %s\n", cula_status_name(status), message);
    return 1;
  }

  for (i = 0; i < V; ++i) {
    const double want = 0.125 * 0.5 * qk * (double)v[i]; /* scale = K^-0.5 */
    if (!(fabs((double)out[i] - want) < 1e-6)) ++wrong; /* a NaN is wrong too */
  }
  printf("cula %d.%d.%d: out[0] = %g, %d of %d values wrong\n", (int)(cula_version() >> 16), (int)(cula_version() >> 8 & 255),
         (int)(cula_version() & 255), (double)out[0], wrong, V);
  puts(wrong ? "MISMATCH" : "OK");
  return wrong != 0;
}
