"""Compile the CUDA source for the CPU, with a POSIX thread for each CUDA thread.

All blocks run at once. CUDA's built-ins (thread indices, barriers, exchanges within a warp) are
written again in a few lines of C++. A barrier that some thread never reaches breaks after a while,
so that the launch fails instead of waiting for ever.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from dataclasses import dataclass

from coadjoint.sweeps.engines.c import compiler
from coadjoint.sweeps.engines.cuda import driver, geometry, source
from coadjoint.sweeps.engines.cuda import engine as cuda_engine

# seconds at a barrier: threads that wait in vain, and not ones that a busy machine is slow to run
PATIENCE = 600
COMPILER = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")

# <cmath> would take longer to read than the kernel to compile
HEAD = r"""
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define ONE(y) \
  extern "C" double y(double) noexcept; \
  extern "C" float y##f(float) noexcept; \
  inline float y(float a) noexcept { return y##f(a); }
ONE(tanh) ONE(exp) ONE(expm1) ONE(log) ONE(log1p) ONE(sqrt)
ONE(sin) ONE(cos) ONE(erf) ONE(atan) ONE(fabs)
extern "C" double pow(double, double) noexcept; extern "C" float powf(float, float) noexcept;
inline float pow(float a, float b) noexcept { return powf(a, b); }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
struct float4 { float x, y, z, w; };
struct double2 { double x, y; };
struct Place1 { int x; };
static thread_local Place1 threadIdx, blockIdx;
static Place1 gridDim;
"""
THREADS = r"""
template <class To, class From> static To bits(From y) { To z; memcpy(&z, &y, sizeof z); return z; }
static int __float_as_int(float y) { return bits<int>(y); }
static float __int_as_float(int k) { return bits<float>(k); }
static long long __double_as_longlong(double y) { return bits<long long>(y); }
static double __longlong_as_double(long long k) { return bits<double>(k); }

static volatile int broken = 0;
static void leave() { pthread_exit(0); }
struct Barrier {
  pthread_mutex_t lock; pthread_cond_t turn; int count, here, round;
  void of(int n) {
    pthread_mutex_init(&lock, 0);
    pthread_cond_init(&turn, 0);
    count = n;
    here = round = 0;
  }
  void wait() {
    pthread_mutex_lock(&lock);
    const int mine = round;
    if (++here == count) { here = 0; round++; pthread_cond_broadcast(&turn); }
    timespec end; clock_gettime(CLOCK_REALTIME, &end); end.tv_sec += PATIENCE;
    while (round == mine && !broken) if (pthread_cond_timedwait(&turn, &lock, &end)) broken = 1;
    pthread_mutex_unlock(&lock);
    if (broken) { pthread_cond_broadcast(&turn); leave(); }
  }
};
struct Warp { Barrier barrier; double lanes[32]; unsigned factors[32][6]; };
struct Block { Barrier barrier; Warp* warps; unsigned char* memory; Barrier* cluster; };
static thread_local Block* block;

static void __syncthreads() { block->barrier.wait(); }
static void PAUSE() { if (broken) leave(); sched_yield(); }
template <class T, class Of> static T among(T y, Of of) {
  Warp& w = block->warps[threadIdx.x / 32];
  memcpy(&w.lanes[threadIdx.x % 32], &y, sizeof y);
  w.barrier.wait();
  const T z = of(w.lanes);
  w.barrier.wait();
  return z;
}
template <class T> static T __shfl_xor_sync(unsigned, T y, int m) {
  return among(y, [&](double* lanes) {
    T z;
    memcpy(&z, &lanes[threadIdx.x % 32 ^ m], sizeof z);
    return z;
  });
}
static unsigned __reduce_max_sync(unsigned, unsigned y) {
  return among(y, [&](double* lanes) {
    unsigned top = 0, z;
    for (int i = 0; i < 32; i++) { memcpy(&z, &lanes[i], 4); top = max(top, z); }
    return top;
  });
}
static int __ffs(int y) { return __builtin_ffs(y); }
static void atomicMax(unsigned* p, unsigned y) {
  unsigned old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  const int order = __ATOMIC_SEQ_CST;
  while (old < y && !__atomic_compare_exchange_n(p, &old, y, false, order, order)) {}
}
// sum [16, 8] += a [16, 8] b [8, 8], with the entries where the lanes of a tensor core have them
static void emulated_multiply(float* sum, const unsigned* a, const unsigned* b) {
  Warp& w = block->warps[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  memcpy(w.factors[lane], a, 4 * sizeof(unsigned));
  memcpy(w.factors[lane] + 4, b, 2 * sizeof(unsigned));
  w.barrier.wait();
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double y = sum[i];
    for (int k = 0; k < 8; k++) {
      const unsigned f = w.factors[row % 8 * 4 + k % 4][k / 4 * 2 + row / 8];
      const unsigned g = w.factors[column * 4 + k % 4][4 + k / 4];
      y += (double)bits<float>(f & ~0x1fffu) * bits<float>(g & ~0x1fffu);
    }
    sum[i] = y;
  }
  w.barrier.wait();
}
// The blocks of a cluster lie side by side, and so do their numbers.
static void emulated_meeting() { block->cluster->wait(); }
static void emulated_gift(int rank, void* to, float y) {
  Block* other = block - blockIdx.x % CLUSTER_SIZE + rank;
  memcpy(other->memory + ((unsigned char*)to - block->memory), &y, sizeof y);
}
#define EMULATED
#define SYNC_WARP() block->warps[threadIdx.x / 32].barrier.wait()
#define KERNEL(name) static void name(const Args& a)
#define SHARED_MEMORY unsigned char* shared = block->memory
"""
# shared memory begins as what it may hold on a device: anything
LAUNCH = r"""
template <class T> static T* many(int count) { return (T*)calloc(count, sizeof(T)); }
struct Job { const Args* a; Block* block; int thread, number; };
static void* begin(void* given) {
  const Job& j = *(Job*)given;
  threadIdx.x = j.thread; blockIdx.x = j.number; block = j.block;
  NAME(*j.a);
  return 0;
}
extern "C" int launch(const Args* a, int grid, int shared) {
  gridDim.x = grid;
  Block* blocks = many<Block>(grid);
  Job* jobs = many<Job>(grid * NT);
  pthread_t* threads = many<pthread_t>(grid * NT);
  for (int g = 0; g < grid; g++) {
    Block& b = blocks[g];
    b.barrier.of(NT);
    b.warps = many<Warp>(NT / 32);
    for (int w = 0; w < NT / 32; w++) b.warps[w].barrier.of(32);
    if (g % CLUSTER == 0) {
      b.cluster = many<Barrier>(1);
      b.cluster->of(CLUSTER * NT);
    } else {
      b.cluster = blocks[g - 1].cluster;
    }
    b.memory = (unsigned char*)aligned_alloc(64, (shared + 63) / 64 * 64);
    memset(b.memory, 0xff, shared);
  }
  for (int i = 0; i < grid * NT; i++) jobs[i] = {a, blocks + i / NT, i % NT, i / NT};
  for (int i = 0; i < grid * NT; i++) if (pthread_create(threads + i, 0, begin, jobs + i)) abort();
  for (int i = 0; i < grid * NT; i++) pthread_join(threads[i], 0);
  for (int g = 0; g < grid; g++) {
    if (g % CLUSTER == 0) free(blocks[g].cluster);
    free(blocks[g].memory);
    free(blocks[g].warps);
  }
  free(blocks); free(jobs); free(threads);
  return broken;
}
"""
POINTS = r"""
extern "C" void launch(const Args* a, int grid, int threads) {
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) points(*a);
}
"""


@functools.cache
def compiled(text, *flags):
    """The source as a library, from the package's cache if it was compiled before."""
    command = [COMPILER, "-std=c++17", "-O0", "-w", "-fPIC", "-shared", "-pthread", *flags]
    libraries = ["-nodefaultlibs", "-lm", "-lc"]  # that of C++ would take as long to link

    def make(out):
        code = out.with_suffix(".cpp")
        code.write_text(text)
        whole = [*command, str(code), "-o", str(out), *libraries]
        done = subprocess.run(whole, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]

    file = os.stat(os.path.realpath(COMPILER))
    recipe = "\0".join((text, *command, *libraries, str(file.st_size), str(file.st_mtime_ns)))
    return ctypes.CDLL(str(compiler.cached_file(recipe, ".so", make)))


@dataclass(frozen=True)
class Mode:
    """A chip: what a thread, a block and the whole may hold."""

    weights: int = geometry.WEIGHTS
    shared: int = geometry.SHARED
    rows: int = geometry.ROWS
    traffic: int = geometry.TRAFFIC
    warps: int = 1
    processors: int = 4
    tensor_weights: tuple = ()  # no tensor cores
    layout: geometry.Geometry | None = None  # of every network, in place of the chosen one

    def choose(self, *given):
        """The geometry of a network on this chip."""
        return self.layout or CACHES[0](*given)


MODULES = (driver, geometry, source, cuda_engine)
CACHES = (
    geometry.choose_geometry,
    geometry.choose_plain,
    geometry.cheapest_tile,
    geometry.place_weights,
    source.kernel_source,
    cuda_engine.pointwise_kernel,
)  # they depend on the chip


class Emulated(cuda_engine.Launch):
    """A sweep on threads of the CPU."""

    def launch(self, name, options, pack):
        g = self.geometry
        text, shared = source.kernel_source(
            name, self.plan.cell, g, self.d, self.like.dtype, self.plan.rows.uniform, *options
        )
        library = compiled(
            HEAD + THREADS + text + LAUNCH,
            f"-DNAME={name}",
            f"-DPATIENCE={PATIENCE}",
            f"-DCLUSTER_SIZE={g.cluster}",
        )
        assert not library.launch(pack, g.groups * g.parts, shared), (
            f"a thread of {name} waits for others in vain"
        )


def install(monkeypatch, mode):
    """Engine `cuda` on this chip, made of threads."""
    forget()
    patches = {
        "WEIGHTS": mode.weights, "SHARED": mode.shared, "ROWS": mode.rows, "TRAFFIC": mode.traffic,
        "WARPS": mode.warps, "TENSOR_WEIGHTS": mode.tensor_weights, "Launch": Emulated,
        "choose_geometry": mode.choose,
        "processor_count": lambda device: mode.processors,
        "shared_memory_limit": lambda device: geometry.LIMIT,
        "cluster_counts": lambda device: (),
        "load_function": lambda text, name, device, shared: compiled(HEAD + text + POINTS),
        "launch_kernel": lambda library, grid, threads, shared, pack,
        device: library.launch(pack, grid, threads),
    }  # fmt: skip
    for name, value in patches.items():
        holders = [
            module for module in MODULES if hasattr(module, name)
        ]  # a name is bound where it is imported, too
        assert holders, name
        for module in holders:
            monkeypatch.setattr(module, name, value)


def forget():
    """What was cached for a chip that is no longer there."""
    for cache in CACHES:
        cache.cache_clear()
