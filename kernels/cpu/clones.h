/* SPDX-License-Identifier: Apache-2.0 */
/* MZ_CLONES before a function: the compiler builds it for several widths
 * of vectors and the loader picks one, so one binary serves every x86-64. It
 * marks the inner function that works on a range, not the one with the OpenMP
 * region: a region's outlined body would be built for the base target only. */
#ifndef MZ_KERNELS_CPU_CLONES_H
#define MZ_KERNELS_CPU_CLONES_H

/* The loader runs the choosing function before ThreadSanitizer is ready, and
 * the program dies there. */
#if defined(__SANITIZE_THREAD__)
#define MZ_CLONES
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MZ_CLONES
#endif
#endif

#ifndef MZ_CLONES
#if defined(__x86_64__) && defined(__gnu_linux__)
#define MZ_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define MZ_CLONES
#endif
#endif

#endif
