// A continuous-batching decode loop in plain C++ on libcula.so. See README.md beside this file.
//
//   engine [--device auto|cpu|cuda] [--requests N] [--capacity N] [--layers N] [--seed N] [--check-all]
//
// Exits with 0 and a last line OK if the results of the checked requests agree with a float64 recurrence, else with 1.
#include <cula.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "engine.h"

namespace {

using engine::Request;

struct Options {
  std::string device = "auto";
  int64_t requests = 40;
  int64_t capacity = 12;
  uint64_t seed = 1;
  bool check_all = false;
  engine::Shape shape;
};

// Rounding to bf16 (half a unit of 2^-7) costs at most 2^-8 / sqrt(3) = 2.3e-3 relative RMSE and 1.7e-3 on random values;
// a float32 state is off by a few units of 2^-24 a token.
constexpr double kOutLimit = 2.5e-3, kStateLimit = 1e-6;

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    auto value = [&]() -> std::string {
      if (i + 1 == argc) throw std::invalid_argument(name + " needs a value");
      return argv[++i];
    };
    auto number = [&](int64_t low, int64_t high) {
      const std::string text = value();
      char* end = nullptr;
      const long long parsed = std::strtoll(text.c_str(), &end, 10);
      if (text.empty() || *end != '\0' || parsed < low || parsed > high)
        throw std::invalid_argument(name + " takes " + std::to_string(low) + " to " + std::to_string(high) + ", not '" + text + "'");
      return static_cast<int64_t>(parsed);
    };
    if (name == "--device") {
      options.device = value();
      if (options.device != "auto" && options.device != "cpu" && options.device != "cuda")
        throw std::invalid_argument("--device takes auto, cpu or cuda, not '" + options.device + "'");
    } else if (name == "--requests") {
      options.requests = number(1, 100000);
    } else if (name == "--capacity") {
      options.capacity = number(1, 4096);
    } else if (name == "--layers") {
      options.shape.layers = number(1, 64);
    } else if (name == "--seed") {
      options.seed = static_cast<uint64_t>(number(0, INT64_MAX));
    } else if (name == "--check-all") {
      options.check_all = true;
    } else {
      throw std::invalid_argument("unknown option " + name +
                                  "; known: --device --requests --capacity --layers --seed --check-all");
    }
  }
  return options;
}

std::unique_ptr<engine::Device> open_device(const std::string& choice) {
  if (choice == "cpu") return engine::make_cpu();
  try {
    return engine::make_cuda(0);
  } catch (const std::runtime_error& error) {
    if (choice == "cuda") throw;
    std::printf("no GPU is used: %s\n", error.what());
    return engine::make_cpu();
  }
}

// Requests in order of arrival. The last one is always checked: its slot has had other owners before.
std::vector<Request> make_workload(const Options& options) {
  engine::Random random(options.seed + 1);
  std::vector<Request> requests(static_cast<size_t>(options.requests));
  int64_t arrival = 0;
  for (Request& request : requests) {
    arrival += random.range(0, 3);
    request.arrival = arrival;
    request.prompt.resize(static_cast<size_t>(random.range(3, 20)));
    for (int32_t& token : request.prompt) token = random.range(0, static_cast<int32_t>(options.shape.vocabulary()) - 1);
    request.max_new = random.range(8, 48);
    if (options.check_all || &request == &requests.back()) request.trace = std::make_unique<engine::Trace>();
  }
  return requests;
}

int serve(const Options& options) {
  if (cula_version() >> 16 != CULA_VERSION_MAJOR) throw std::runtime_error("libcula.so is of another major version than cula.h");
  const std::unique_ptr<engine::Device> device = open_device(options.device);
  const engine::Model model(options.shape, options.seed);
  engine::Engine engine(*device, model, options.shape, options.capacity);
  std::vector<Request> requests = make_workload(options);
  std::printf("device %s, kernel %s, %lld layers, %lld rows\n", device->name().c_str(), engine.kernel(),
              static_cast<long long>(options.shape.layers), static_cast<long long>(options.capacity));

  using Clock = std::chrono::steady_clock;
  std::vector<double> step_us;
  int64_t tokens = 0, now = 0;
  size_t next = 0;
  const auto start = Clock::now();
  while (next < requests.size() || engine.running() > 0) {
    while (next < requests.size() && requests[next].arrival <= now && engine.admit(&requests[next])) ++next;
    const auto before = Clock::now();
    tokens += engine.step();
    step_us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - before).count());
    ++now;
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  std::nth_element(step_us.begin(), step_us.begin() + static_cast<std::ptrdiff_t>(step_us.size() / 2), step_us.end());
  std::printf("%lld requests, %lld tokens in %zu steps: %.0f tokens/s, median step %.1f us\n",
              static_cast<long long>(options.requests), static_cast<long long>(tokens), step_us.size(),
              static_cast<double>(tokens) / seconds, step_us[step_us.size() / 2]);

  bool ok = true;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!requests[i].trace) continue;
    const engine::Errors errors = engine::compare(model, options.shape, *requests[i].trace);
    const bool good = errors.out < kOutLimit && errors.state < kStateLimit;  // false for NaN
    ok = ok && good;
    if (!good || i + 1 == requests.size())
      std::printf("request %zu, %zu tokens against float64: out %.2e (limit %.1e), state %.2e (limit %.0e)%s\n", i,
                  requests[i].trace->tokens.size(), errors.out, kOutLimit, errors.state, kStateLimit, good ? "" : " MISMATCH");
  }
  if (!engine.padding_intact()) {
    std::printf("a padded row or a slot that nobody owns was written: MISMATCH\n");
    ok = false;
  }
  std::printf("%s\n", ok ? "OK" : "FAILED");
  return ok ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return serve(parse(argc, argv));
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "engine: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "engine: %s\n", error.what());
    return 1;
  }
}
