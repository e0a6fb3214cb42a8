#include "reference.h"

#include <cmath>

namespace engine {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double inverse_norm(const double* x, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return 1.0 / std::sqrt(sum + 1e-6);
}

double worse(double a, double b) { return std::isnan(a) || a > b ? a : b; }  // NaN wins from either side

}  // namespace

Errors compare(const Model& model, const Shape& shape, const Trace& trace) {
  const int64_t K = shape.k, V = shape.v, HV = shape.value_heads, T = static_cast<int64_t>(trace.tokens.size());
  const int64_t group = HV / shape.heads;
  const double scale = 1.0 / std::sqrt(static_cast<double>(K));
  Errors errors;
  std::vector<double> row(static_cast<size_t>(shape.width())), u(static_cast<size_t>(V)), o(static_cast<size_t>(V));

  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    std::vector<double> state(static_cast<size_t>(shape.state()), 0.0);  // [HV, K, V]
    double out_error = 0.0, out_norm = 0.0, state_error = 0.0, state_norm = 0.0;

    for (int64_t t = 0; t < T; ++t) {
      const uint16_t* bits = model.row(layer, trace.tokens[static_cast<size_t>(t)]);
      for (int64_t i = 0; i < shape.width(); ++i) row[static_cast<size_t>(i)] = static_cast<double>(from_bf16(bits[i]));
      for (int64_t h = 0; h < HV; ++h) {
        const double* q = row.data() + h / group * K;
        const double* k = row.data() + (shape.heads + h / group) * K;
        const double* v = row.data() + 2 * shape.heads * K + h * V;
        const double* gate = row.data() + shape.gate_at() + h * K;
        const double beta = sigmoid(row[static_cast<size_t>(shape.beta_at() + h)]);
        const double q_unit = inverse_norm(q, K) * scale, k_unit = inverse_norm(k, K);
        const double a = std::exp(static_cast<double>(model.A_log(layer)[h]));
        double* S = state.data() + h * K * V;

        for (int64_t j = 0; j < V; ++j) u[static_cast<size_t>(j)] = v[j];
        for (int64_t i = 0; i < K; ++i) {
          const double bias = static_cast<double>(model.dt_bias(layer)[h * K + i]);
          const double decay = std::exp(static_cast<double>(Model::kLowerBound) * sigmoid(a * (gate[i] + bias)));
          for (int64_t j = 0; j < V; ++j) {
            S[i * V + j] *= decay;
            u[static_cast<size_t>(j)] -= S[i * V + j] * k[i] * k_unit;
          }
        }
        for (double& x : o) x = 0.0;
        for (int64_t i = 0; i < K; ++i)
          for (int64_t j = 0; j < V; ++j) {
            S[i * V + j] += k[i] * k_unit * beta * u[static_cast<size_t>(j)];
            o[static_cast<size_t>(j)] += S[i * V + j] * q[i] * q_unit;
          }

        const uint16_t* got = trace.out.data() + ((t * shape.layers + layer) * HV + h) * V;
        for (int64_t j = 0; j < V; ++j) {
          const double want = o[static_cast<size_t>(j)], difference = static_cast<double>(from_bf16(got[j])) - want;
          out_error += difference * difference;
          out_norm += want * want;
        }
      }
    }

    for (int64_t h = 0; h < HV; ++h)
      for (int64_t i = 0; i < K; ++i)
        for (int64_t j = 0; j < V; ++j) {
          const double want = state[static_cast<size_t>((h * K + i) * V + j)];
          const double got = static_cast<double>(trace.state[static_cast<size_t>(((layer * HV + h) * V + j) * K + i)]);
          state_error += (got - want) * (got - want);
          state_norm += want * want;
        }
    errors.out = worse(std::sqrt(out_error / out_norm), errors.out);
    errors.state = worse(std::sqrt(state_error / state_norm), errors.state);
  }
  return errors;
}

}  // namespace engine
