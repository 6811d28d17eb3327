// A plain C interface to SGLang's Marlin kernels (bf16 activations, NVFP4 and MXFP4 weights), without torch and without TVM's runtime.
// `python benchmarks/marlin.py build` compiles this file twice (MOE, DENSE: their headers have no guards) beside a copy of SGLang's
// sources that leaves the other formats out. Every function returns 0, or 1 with the reason in marlin_error().
#include <sgl_kernel/utils.cuh>

#include <cstdio>
#include <exception>

extern char marlin_message[1024];

template <typename F>
static int guarded(F&& f) {
  try {
    f();
    cudaError_t e = cudaGetLastError();
    if (e == cudaSuccess) return 0;
    snprintf(marlin_message, sizeof marlin_message, "%s", cudaGetErrorString(e));
  } catch (std::exception const& e) {
    snprintf(marlin_message, sizeof marlin_message, "%s", e.what());
  }
  return 1;
}

#ifdef MOE
#include "gemm/marlin_moe/moe_wna16_marlin.cuh"
#include "moe/topk_sum.cuh"

char marlin_message[1024] = "";

extern "C" const char* marlin_error() { return marlin_message; }

// y[pair] = (x[pair / top_k] w[expert]^T + bias[expert]) * topk_weights[pair] when ``weighted``, else without the last factor; bias may be null.
// Expert ids ascend, all experts are local; ``counts``: two int32 on the device, the length of sorted_ids and 0.
extern "C" int marlin_moe(void* x, void* w, void* y, void* partial, void* bias, void* scale, void* global_scale, void* sorted_ids,
                          void* expert_ids, void* counts, void* topk_weights, void* locks, int block_m, int top_k, int weighted, int m, int n,
                          int k, int group, int device, void* stream, int sms, int atomic_add) {
  auto call = [&](auto has_bias) {
    constexpr bool b = decltype(has_bias)::value;
    sglang::device::marlin_moe::marlin_mm<__nv_bfloat16, false, b, true, false, true>(
        x, w, y, partial, bias, scale, global_scale, nullptr, nullptr, nullptr, nullptr, sorted_ids, expert_ids, counts, topk_weights, block_m,
        top_k, weighted != 0, false, m, n, k, locks, sglang::host::kFE2M1f, b, false, true, false, k / group, group, device,
        static_cast<cudaStream_t>(stream), -1, -1, sms, atomic_add != 0, true, false);
  };
  return guarded([&] { bias ? call(std::true_type{}) : call(std::false_type{}); });
}

// y[t] = sum over the top_k rows of x[t]
extern "C" int marlin_topk_sum(void* x, void* y, int tokens, int top_k, int n, void* stream) {
  return guarded([&] {
    auto p = sglang::TopkSumParams{
        .in = static_cast<const __nv_bfloat16*>(x), .out = static_cast<__nv_bfloat16*>(y), .K = uint32_t(n), .topk = uint32_t(top_k)};
    dim3 grid((n / 8 + 255) / 256, tokens);
    sglang::host::LaunchKernel(grid, 256, static_cast<cudaStream_t>(stream)).enable_pdl(true)(sglang::topk_sum_kernel<256, true>, p);
  });
}
#else
#include "gemm/marlin/gptq_marlin.cuh"

// y = x w^T, NVFP4
extern "C" int marlin_dense(void* x, void* w, void* y, void* partial, void* scale, void* global_scale, void* locks, int m, int n, int k,
                            int device, void* stream, int sms, int atomic_add) {
  return guarded([&] {
    sglang::device::marlin::marlin_mm<__nv_bfloat16>(x, w, y, partial, scale, global_scale, nullptr, nullptr, nullptr, nullptr, m, n, k, k,
                                                     locks, sglang::host::kFE2M1f, false, true, false, k / 16, 16, device,
                                                     static_cast<cudaStream_t>(stream), -1, -1, sms, atomic_add != 0, true, false);
  });
}
#endif
