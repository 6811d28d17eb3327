// Warps 4 and on wait for work as Triton's warp_specialize lets them: a byte each says what to run, barriers of the whole block stand between
// each write and each read. There is no race, unless DROP leaves out the second barrier. INNER is a barrier of the first four warps alone.
//
// nvcc -arch=sm_90a -lineinfo -DWORK=32 '-DWHOLE="barrier.sync 1"' '-DINNER="bar.sync 0, 128"' -o handover handover.cu
// compute-sanitizer --tool racecheck ./handover                                      reports races (2025.3.1): the tool's mistake
// ... without INNER, or '-DWHOLE="barrier.sync 1; barrier.sync 1"'                   none
// ... twice and -DDROP                                                               reports the race that is there
// All variants: benchmarks/raw/racecheck_handover.txt
#include <cstdio>
#define FIRST 128
#define all() asm volatile(WHOLE ";" ::: "memory")
#ifdef DROP
#define second()
#else
#define second() all()
#endif

__global__ void __launch_bounds__(FIRST + WORK) hand(int *out) {
  __shared__ unsigned state;
  __shared__ int captured;
  int warp = threadIdx.x / 32;
  if (warp < FIRST / 32) {
    *(volatile unsigned *)&state = 0x02000101;
    *(volatile int *)&captured = blockIdx.x;
    all();
    second();
    *(volatile int *)&captured = 5;  // this memory has another use from here on
    int sum = 0;
    for (int i = 0; i < 16; i++) {
      sum += out[(threadIdx.x + i * 128) & 1023];
#ifdef INNER
      asm volatile(INNER ";" ::: "memory");
#endif
    }
    all();
    *(volatile unsigned *)&state = 0x03030303;
    all();
    out[1024 + blockIdx.x * 256 + threadIdx.x] = sum;
  } else {
    while (true) {
      all();
      int part = ((volatile unsigned char *)&state)[warp - FIRST / 32];
      if (part == 3) break;
      if (part == 0) {
        int c = *(volatile int *)&captured;
        second();
        out[1024 + blockIdx.x * 256 + threadIdx.x] = c;
        all();
      } else {
        second();
        all();
      }
    }
  }
}

int main() {
  int *p;
  cudaMalloc(&p, 1 << 22);
  cudaMemset(p, 0, 1 << 22);
  for (int i = 0; i < 20; i++) hand<<<132, FIRST + WORK>>>(p);
  printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
