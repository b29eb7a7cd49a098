#pragma once
#include <cstdio>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/isa.h"
#include "testing/guard.h"

// What the tests of kernel families share: the rows of a manifest, and matrices between guard pages.
//
// A test declares and lists its family's kernels from the manifest, so that none exists untested:
//
//   #define ENCAST_KERNEL(op, name, arithmetic, isa, min_rows, Fn) extern std::remove_pointer_t<Fn> name;
//   #include "kernels/norm/kernels.inc"
//   #undef ENCAST_KERNEL
//   #define ENCAST_KERNEL ENCAST_KERNEL_ROW
//   const ManifestRow kManifest[] = {
//   #include "kernels/norm/kernels.inc"
//   };
namespace encast::testing {

struct ManifestRow {
  const char* op;
  const char* name;
  Isa isa;
  void (*fn)();
};

#define ENCAST_KERNEL_ROW(op, name, arithmetic, isa, min_rows, Fn) \
  {#op, #name, Isa::isa, reinterpret_cast<void (*)()>(&name)},

template <class Fn>
struct KernelUnderTest {
  const char* name;
  Fn fn;
};

// The kernels of `op` that this machine may run, slowest level first; the others are named once on stdout.
template <class Fn, size_t n>
std::vector<KernelUnderTest<Fn>> runnable(const ManifestRow (&manifest)[n], std::string_view op) {
  static std::set<std::string> reported;
  std::vector<KernelUnderTest<Fn>> kernels;
  for (const ManifestRow& row : manifest) {
    if (row.op != op) continue;
    if (isa_allowed(row.isa)) {
      kernels.push_back({row.name, reinterpret_cast<Fn>(row.fn)});
    } else if (reported.insert(row.name).second) {
      std::printf("SKIP %s: this machine or ENCAST_ISA does not allow %s\n", row.name, isa_name(row.isa));
    }
  }
  return kernels;
}

// Rows with a stride, whose last element touches a page without access. Between the rows lies the guard's
// fill byte, which check_gaps() looks for.
template <class T>
struct GuardedMatrix {
  GuardedMatrix(int64_t rows, int64_t cols, int64_t stride)
      : rows(rows),
        cols(cols),
        stride(stride),
        buffer(rows == 0 ? 0 : static_cast<size_t>((rows - 1) * stride + cols)) {}
  GuardedMatrix(int64_t rows, int64_t cols) : GuardedMatrix(rows, cols, cols) {}

  T* row(int64_t i) { return buffer.data() + i * stride; }
  const T* row(int64_t i) const { return buffer.data() + i * stride; }
  T* data() { return buffer.data(); }
  const T* data() const { return buffer.data(); }
  T& at(int64_t i, int64_t j) { return row(i)[j]; }
  const T& at(int64_t i, int64_t j) const { return row(i)[j]; }

  bool check_gaps() const {
    for (int64_t i = 0; i + 1 < rows; ++i) {
      if (!untouched(i, cols, stride)) return false;
    }
    return buffer.check_slack();
  }
  // Elements [begin, end) of a row still hold the fill byte.
  bool untouched(int64_t i, int64_t begin, int64_t end) const {
    const uint8_t* first = reinterpret_cast<const uint8_t*>(row(i) + begin);
    const uint8_t* last = reinterpret_cast<const uint8_t*>(row(i) + end);
    for (; first < last; ++first) {
      if (*first != 0xa5) return false;
    }
    return true;
  }

  int64_t rows, cols, stride;
  GuardedBuffer<T> buffer;
};

}  // namespace encast::testing
