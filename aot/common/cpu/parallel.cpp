// One list of open jobs under one mutex. A job lives on its caller's stack; a helper joins it under the mutex, takes ranges from
// an atomic counter without it, and leaves under the mutex. The caller takes the job off the list when no range is left and
// waits for the helpers that are still in their last one.
#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "cpu_count.h"

namespace cula {
namespace {

struct Job {
  ParallelFn fn;
  void* ctx;
  int64_t items;
  int64_t grain;
  int64_t share;     // a range is the rest of the items over this, at least a grain
  int32_t openings;  // helpers that may still join
  std::atomic<int32_t> working{0};  // helpers inside; changed under the mutex
  std::atomic<int64_t> next{0};
  Job* before = nullptr;
  Job* after = nullptr;
};

struct Pool {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t work = PTHREAD_COND_INITIALIZER;  // for helpers: a job opened, or the end
  pthread_cond_t done = PTHREAD_COND_INITIALIZER;  // for callers: the last helper left a job
  Job* jobs = nullptr;
  bool closed = false;
  int32_t size = 1;     // threads, a caller included
  int32_t started = 0;  // of size - 1
  pthread_t* handles = nullptr;
};

// Set once and, in the child of a fork, reset. A pool is never freed: a thread may still hold it.
std::atomic<Pool*> g_pool{nullptr};
std::atomic<bool> g_closed{false};

void run_ranges(Job& job) noexcept {
  int64_t begin = job.next.load(std::memory_order_relaxed);
  for (;;) {
    if (begin >= job.items) return;
    // Guided: long ranges first, single grains at the end, so that the threads finish together.
    int64_t count = (job.items - begin) / job.share;
    if (count < job.grain) count = job.grain;
    const int64_t end = job.items - begin < count ? job.items : begin + count;
    if (!job.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
    job.fn(job.ctx, begin, end);
    begin = job.next.load(std::memory_order_relaxed);
  }
}

int64_t now_ns() noexcept {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

// A helper's last range mostly is a grain of 5 us; after a sleep the caller would need 10 to 40 us to wake up.
void spin_while_working(const Job& job) noexcept {
  constexpr int64_t kSpinNs = 20000;
  const int64_t end = now_ns() + kSpinNs;
  while (job.working.load(std::memory_order_relaxed) != 0 && now_ns() < end) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

void open_job(Pool& pool, Job& job) noexcept {
  job.after = pool.jobs;
  if (pool.jobs != nullptr) pool.jobs->before = &job;
  pool.jobs = &job;
}

void close_job(Pool& pool, Job& job) noexcept {
  (job.before != nullptr ? job.before->after : pool.jobs) = job.after;
  if (job.after != nullptr) job.after->before = job.before;
}

void* helper(void* argument) noexcept {
  Pool& pool = *static_cast<Pool*>(argument);
  prctl(PR_SET_NAME, "cula-cpu");
  pthread_mutex_lock(&pool.mutex);
  while (!pool.closed) {
    Job* job = pool.jobs;
    while (job != nullptr && job->openings == 0) job = job->after;
    if (job == nullptr) {
      pthread_cond_wait(&pool.work, &pool.mutex);
      continue;
    }
    --job->openings;
    job->working.fetch_add(1, std::memory_order_relaxed);
    pthread_mutex_unlock(&pool.mutex);
    run_ranges(*job);
    pthread_mutex_lock(&pool.mutex);
    job->openings = 0;  // no range is left, so nobody else need join
    // The caller may return, and the job be gone, as soon as this reads 0 and the mutex is free.
    if (job->working.fetch_sub(1, std::memory_order_release) == 1) pthread_cond_broadcast(&pool.done);
  }
  pthread_mutex_unlock(&pool.mutex);
  return nullptr;
}

// Called with the mutex held.
void start_helpers(Pool& pool, int32_t wanted) noexcept {
  if (pool.handles == nullptr) {
    pool.handles = static_cast<pthread_t*>(std::malloc(sizeof(pthread_t) * static_cast<size_t>(pool.size)));
    if (pool.handles == nullptr) return;
  }
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the application's own threads
  while (pool.started < wanted) {
    // Out of threads: the callers do the work.
    if (pthread_create(&pool.handles[pool.started], nullptr, helper, &pool) != 0) break;
    ++pool.started;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool* the_pool() noexcept {
  Pool* pool = g_pool.load(std::memory_order_acquire);
  if (pool != nullptr || g_closed.load(std::memory_order_relaxed)) return pool;
  // No lock around the creation: a fork while another thread holds it would leave it locked in the child.
  Pool* fresh = new (std::nothrow) Pool;
  if (fresh == nullptr) return nullptr;
  fresh->size = cpu::default_threads();
  if (g_pool.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return fresh;
  delete fresh;
  return pool;
}

// The helpers do not exist in the child, and the mutex may be held for ever by one of them. Leaked on purpose.
void forget_pool() noexcept { g_pool.store(nullptr, std::memory_order_relaxed); }

__attribute__((constructor)) void at_load() { pthread_atfork(nullptr, nullptr, forget_pool); }

// The code of the helpers is about to be unmapped, or the process to exit.
__attribute__((destructor)) void at_unload() {
  g_closed.store(true, std::memory_order_relaxed);
  Pool* pool = g_pool.load(std::memory_order_acquire);
  if (pool == nullptr) return;
  pthread_mutex_lock(&pool->mutex);
  pool->closed = true;
  pthread_cond_broadcast(&pool->work);
  const int32_t started = pool->started;
  pthread_mutex_unlock(&pool->mutex);
  for (int32_t i = 0; i < started; ++i) pthread_join(pool->handles[i], nullptr);
  // Not freed: at exit another thread may still be inside parallel_for. It finds no helpers and does all of its work itself.
}

}  // namespace

void parallel_for(int64_t items, int64_t item_bytes, int32_t threads, ParallelFn fn, void* ctx) noexcept {
  if (items <= 0) return;
  if (item_bytes < 1) item_bytes = 1;
  const int64_t grain = item_bytes < kGrainBytes ? kGrainBytes / item_bytes : 1;
  const bool solo = (items - 1) / grain < 3 && items <= kSoloBytes / item_bytes;
  Pool* pool = threads == 1 || solo ? nullptr : the_pool();
  int64_t helpers = 0;
  if (pool != nullptr) {
    helpers = (threads <= 0 || threads > pool->size ? pool->size : threads) - 1;
    if (helpers > (items - 1) / grain) helpers = (items - 1) / grain;
  }
  if (helpers <= 0) {
    fn(ctx, 0, items);
    return;
  }

  Job job{fn, ctx, items, grain, 2 * (helpers + 1), static_cast<int32_t>(helpers)};
  pthread_mutex_lock(&pool->mutex);
  if (pool->started < job.openings && !pool->closed) start_helpers(*pool, job.openings);
  open_job(*pool, job);
  for (int64_t i = 0; i < helpers && i < pool->started; ++i) pthread_cond_signal(&pool->work);
  pthread_mutex_unlock(&pool->mutex);

  run_ranges(job);

  pthread_mutex_lock(&pool->mutex);
  close_job(*pool, job);
  if (job.working.load(std::memory_order_relaxed) != 0) {
    pthread_mutex_unlock(&pool->mutex);
    spin_while_working(job);
    pthread_mutex_lock(&pool->mutex);
    while (job.working.load(std::memory_order_relaxed) != 0) pthread_cond_wait(&pool->done, &pool->mutex);
  }
  pthread_mutex_unlock(&pool->mutex);
}

}  // namespace cula
