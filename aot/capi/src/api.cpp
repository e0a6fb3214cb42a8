// The exported functions of cula.h. Each is: read the structs, plan, hand the plan to an executor.
#include <cstdio>

#include "api.h"
#include "aot/common/cpu/parallel.h"
#include "driver.h"
#include "launch.h"
#include "names.h"

namespace cula {

cula_status find_op_checked(const char* function, cula_op op, const Op** found) noexcept {
  *found = find_op(op);
  return *found != nullptr ? CULA_OK : fail(CULA_ERR_NOT_FOUND, "%s: there is no op %d", function, op);
}

cula_status plan_call(const char* function, const Op& op, const void* args, int32_t arch, int32_t sm_count, void* workspace, Plan* plan) {
  alignas(8) unsigned char copy[kMaxArgsSize];
  CULA_TRY(read_args(function, op, args, copy));
  if (arch != CULA_ARCH_DEVICE && arch_name(arch) == nullptr) return fail(CULA_ERR_NOT_FOUND, "%s: there is no arch %d", function, arch);
  if (sm_count < 0) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: sm_count is %d; must be 0 or more", function, sm_count);
  const Request request{op.op, op.name, arch, sm_count, workspace};
  return op.plan(request, copy, plan);
}

cula_status check_workspace(const Op& op, const Plan& plan, const void* workspace, size_t bytes) noexcept {
  if (plan.workspace_bytes == 0) return CULA_OK;
  if (workspace != nullptr && bytes >= plan.workspace_bytes && reinterpret_cast<uintptr_t>(workspace) % plan.workspace_align == 0) return CULA_OK;
  return fail(CULA_ERR_WORKSPACE, "%s: the workspace has %zu bytes at %p; needed are %zu bytes, aligned to %zu", op.name, bytes, workspace,
              plan.workspace_bytes, plan.workspace_align);
}

void fill_launches(const Plan& plan, cula_launches* launches) noexcept {
  std::memcpy(launches->storage, plan.storage, plan.storage_used);
  for (int32_t i = 0; i < plan.count; ++i) {
    const LaunchDesc& d = plan.launch[i];
    cula_launch& l = launches->launch[i];
    fill_config(d, launches->stream, &l.config, l.attributes);
    const ptrdiff_t at = static_cast<const unsigned char*>(d.params) - plan.storage;
    fill_params(d, reinterpret_cast<const unsigned char*>(launches->storage) + at, l.params);
    l.kernel = d.kernel;
    l.param_count = d.param_count;
  }
  launches->count = plan.count;
  launches->device_type = plan.device_type;
  launches->device_id = plan.device_id;
  launches->storage_used = plan.storage_used;
}

namespace {

struct CpuCall {
  CpuKernel kernel;
  void* params[CULA_MAX_PARAMS];
};

cula_status run_cpu(const Op& op, const Plan& plan, const void* stream) noexcept {
  if (stream != nullptr) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: stream is %p; CPU tensors take a NULL stream", op.name, stream);
  for (int32_t i = 0; i < plan.count; ++i) {
    const LaunchDesc& d = plan.launch[i];
    CpuCall call;
    call.kernel = kKernels[d.kernel].cpu;
    if (call.kernel == nullptr) return fail(CULA_ERR_ARTIFACT, "%s: kernel %s has no CPU function", op.name, kKernels[d.kernel].id);
    fill_params(d, static_cast<const unsigned char*>(d.params), call.params);
    parallel_for(
        d.cpu_items, d.cpu_item_bytes, d.cpu_threads,
        [](void* context, int64_t begin, int64_t end) {
          CpuCall& c = *static_cast<CpuCall*>(context);
          c.kernel(c.params, begin, end);
        },
        &call);
  }
  return CULA_OK;
}

}  // namespace
}  // namespace cula

using namespace cula;

extern "C" {

uint32_t cula_version(void) noexcept { return CULA_VERSION; }

const char* cula_build_info(void) noexcept { return kBuildInfo; }

const char* cula_status_name(cula_status status) noexcept { return status_name(status); }

const char* cula_op_name(cula_op op) noexcept {
  const Op* found = find_op(op);
  return found != nullptr ? found->name : nullptr;
}

size_t cula_last_error(char* buffer, size_t n) noexcept { return last_error(buffer, n); }

int32_t cula_kernel_count(void) noexcept { return kKernelCount; }

cula_status cula_kernel_info(int32_t index, cula_kernel_desc* desc) noexcept {
  CULA_API_BEGIN
  constexpr size_t kSize = CULA_SIZEOF(cula_kernel_desc), kFirstSize = CULA_SIZE_THROUGH(cula_kernel_desc, max_dynamic_smem);
  CULA_TRY(check_struct("cula_kernel_info", "cula_kernel_desc", desc, kFirstSize, kSize));
  if (index < 0 || index >= kKernelCount) {
    return fail(CULA_ERR_NOT_FOUND, "cula_kernel_info: there is no kernel %d; this library has %d", index, kKernelCount);
  }
  const KernelRow& row = kKernels[index];
  cula_kernel_desc out{};
  out.id = row.id;
  out.entry_symbol = row.entry;
  out.cubin = row.cubin;
  out.cubin_bytes = row.cubin_bytes;
  out.param_sizes = row.param_sizes;
  out.op = row.key.op;
  out.arch = row.key.arch;
  out.param_count = row.param_count;
  out.registers = row.registers;
  out.static_smem = row.static_smem;
  out.max_dynamic_smem = row.max_dynamic_smem;
  out.smem_carveout = row.smem_carveout;
  write_struct(out, kSize, desc);
  return CULA_OK;
  CULA_API_END("cula_kernel_info")
}

cula_status cula_query(cula_op op, const void* args, cula_requirements* requirements) noexcept {
  CULA_API_BEGIN
  constexpr size_t kSize = CULA_SIZEOF(cula_requirements);
  const Op* row;
  CULA_TRY(find_op_checked("cula_query", op, &row));
  CULA_TRY(check_struct("cula_query", "cula_requirements", requirements, kSize, kSize));
  Plan plan;
  CULA_TRY(plan_call("cula_query", *row, args, requirements->arch, requirements->sm_count, nullptr, &plan));
  requirements->workspace_bytes = plan.workspace_bytes;
  requirements->workspace_align = plan.workspace_align;
  requirements->launch_count = plan.count;
  for (int32_t i = 0; i < CULA_MAX_LAUNCHES; ++i) requirements->kernels[i] = i < plan.count ? plan.launch[i].kernel : -1;
  return CULA_OK;
  CULA_API_END("cula_query")
}

cula_status cula_prepare(int32_t device) noexcept {
  CULA_API_BEGIN
  return driver::prepare(device);
  CULA_API_END("cula_prepare")
}

cula_status cula_run(cula_op op, const void* args, void* workspace, size_t workspace_bytes, void* stream) noexcept {
  CULA_API_BEGIN
  const Op* row;
  CULA_TRY(find_op_checked("cula_run", op, &row));
  Plan plan;
  CULA_TRY(plan_call("cula_run", *row, args, CULA_ARCH_DEVICE, 0, workspace, &plan));
  CULA_TRY(check_workspace(*row, plan, workspace, workspace_bytes));
  if (plan.device_type == kDLCPU) return run_cpu(*row, plan, stream);
  if (plan.count == 0) return CULA_OK;
  return driver::launch(row->name, plan, stream);
  CULA_API_END("cula_run")
}

cula_status cula_bind(cula_op op, const void* args, void* workspace, size_t workspace_bytes, cula_launches* launches) noexcept {
  CULA_API_BEGIN
  constexpr size_t kSize = CULA_SIZEOF(cula_launches);
  const Op* row;
  CULA_TRY(find_op_checked("cula_bind", op, &row));
  CULA_TRY(check_struct("cula_bind", "cula_launches", launches, kSize, kSize));
  Plan plan;
  CULA_TRY(plan_call("cula_bind", *row, args, launches->arch, launches->sm_count, workspace, &plan));
  if (plan.device_type == kDLCPU) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: cula_bind describes launches on a GPU; use cula_run for CPU tensors", row->name);
  }
  CULA_TRY(check_workspace(*row, plan, workspace, workspace_bytes));
  fill_launches(plan, launches);
  return CULA_OK;
  CULA_API_END("cula_bind")
}

}  // extern "C"
