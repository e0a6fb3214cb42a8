#include "cpu_count.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace cula::cpu {
namespace {

constexpr int32_t kMaxThreads = 4096;

int32_t affinity_count() noexcept {
  // cpu_set_t ends at 1024 CPUs and the call fails on a machine with more; this mask holds 8192.
  unsigned long mask[8192 / (8 * sizeof(unsigned long))] = {};
  if (sched_getaffinity(0, sizeof mask, reinterpret_cast<cpu_set_t*>(mask)) != 0) return 1;
  int32_t count = 0;
  for (unsigned long word : mask) count += __builtin_popcountl(word);
  return count;
}

// Reads a small file; false if it cannot be read.
bool read_text(const char* path, char* text, size_t size) noexcept {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const ssize_t n = read(fd, text, size - 1);
  close(fd);
  text[n > 0 ? n : 0] = '\0';
  return n > 0;
}

int32_t quota(long long limit, long long period) noexcept {
  if (limit <= 0 || period <= 0) return 0;
  const long long cpus = (limit + period - 1) / period;
  return cpus < kMaxThreads ? static_cast<int32_t>(cpus) : kMaxThreads;
}

// The smallest quota from the process's own group up to the root; 0 if there is none.
int32_t quota_v2() noexcept {
  char text[4096], path[4096 + 64];
  if (!read_text("/proc/self/cgroup", text, sizeof text)) return 0;
  const char* line = std::strstr(text, "0::/");
  if (line == nullptr || (line != text && line[-1] != '\n')) return 0;
  char* group = const_cast<char*>(line) + 3;
  group[std::strcspn(group, "\n")] = '\0';
  int32_t smallest = 0;
  for (;;) {
    std::snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", group);
    char limit[64];
    const int32_t cpus = read_text(path, limit, sizeof limit) ? quota_from_cpu_max(limit) : 0;
    if (cpus > 0 && (smallest == 0 || cpus < smallest)) smallest = cpus;
    char* slash = std::strrchr(group, '/');
    if (slash == nullptr) return smallest;
    *slash = '\0';
  }
}

// Containers mount their own group here; a process outside of one sees the root, which has no quota.
int32_t quota_v1() noexcept {
  char limit[64], period[64];
  if (!read_text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", limit, sizeof limit)) return 0;
  if (!read_text("/sys/fs/cgroup/cpu/cpu.cfs_period_us", period, sizeof period)) return 0;
  return quota(std::strtoll(limit, nullptr, 10), std::strtoll(period, nullptr, 10));
}

}  // namespace

int32_t quota_from_cpu_max(const char* text) noexcept {
  char* end = nullptr;
  const long long limit = std::strtoll(text, &end, 10);
  if (end == text) return 0;  // "max"
  return quota(limit, std::strtoll(end, nullptr, 10));
}

int32_t default_threads() noexcept {
  if (const char* text = std::getenv("CULA_NUM_THREADS")) {
    char* end = nullptr;
    const long wanted = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && wanted >= 1 && wanted <= kMaxThreads) return static_cast<int32_t>(wanted);
  }
  int32_t count = affinity_count();
  int32_t limit = quota_v2();
  if (limit == 0) limit = quota_v1();
  if (limit > 0 && limit < count) count = limit;
  return count < 1 ? 1 : count;
}

}  // namespace cula::cpu
