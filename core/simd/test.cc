#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "simd/probe.h"
#include "testing/check.h"
#include "testing/guard.h"
#include "testing/random.h"
#include "testing/tolerance.h"

using namespace encast;
using namespace encast::testing;

namespace {

struct Level {
  std::string name;
  ProbeTable table;
};

std::vector<Level> levels() {
  std::vector<Level> found;
  const auto offer = [&](Isa isa, ProbeTable (*table)()) {
    if (isa_allowed(isa)) {
      found.push_back({isa_name(isa), table()});
    } else {
      std::printf("SKIP lanes of %s: this machine or ENCAST_ISA does not allow it\n", isa_name(isa));
    }
  };
  offer(Isa::scalar, probe_table_scalar);
  offer(Isa::avx2, probe_table_avx2);
  offer(Isa::avx512, probe_table_avx512);
  return found;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kSpecial[] = {
    0.0f,           -0.0f,          1.0f,       -1.0f,      0.5f,   1.5f,    2.5f,          -2.5f,
    kInfinity,      -kInfinity,     kNan,       -kNan,      1e-45f, -1e-45f, 1e-38f,        3.4e38f,
    -3.4e38f,       88.7f,          88.8f,      89.5f,      -87.4f, -103.9f, -104.1f,       -200.0f,
    5.39f,          5.4f,           -5.39f,     -5.4f,      0.625f, -0.625f, 2147483520.0f, 2147483648.0f,
    -2147483648.0f, -2147483904.0f, 8388607.5f, 0.49999997f};

// Special values, every exponent, and the range in which the functions live.
std::vector<float> sample(uint64_t stream, size_t n) {
  Rng rng(stream);
  std::vector<float> x;
  for (float first : kSpecial) x.push_back(first);
  while (x.size() < n) {
    switch (x.size() % 4) {
      case 0:
        x.push_back(std::bit_cast<float>(static_cast<uint32_t>(rng.bits())));
        break;
      case 1:
        x.push_back(rng.uniform(-110.0f, 95.0f));
        break;
      case 2:
        x.push_back(rng.uniform(-8.0f, 8.0f));
        break;
      default:
        x.push_back(rng.uniform(-1.0f, 1.0f) * std::exp2(static_cast<float>(rng.integer(-40, 4))));
        break;
    }
  }
  x.resize((x.size() + 15) / 16 * 16, 0.25f);
  return x;
}

std::vector<float> run(const Probe& probe, const std::vector<float>& a, const std::vector<float>& b,
                       const std::vector<float>& c) {
  std::vector<float> out(a.size());
  probe.fn(a.data(), b.data(), c.data(), static_cast<int64_t>(a.size()), out.data());
  return out;
}

std::vector<float> run(const Level& level, const std::string& name, const std::vector<float>& a,
                       const std::vector<float>& b, const std::vector<float>& c) {
  for (int i = 0; i < level.table.count; ++i) {
    if (name == level.table.probes[i].name) return run(level.table.probes[i], a, b, c);
  }
  CHECK(false, "no probe ", name);
  return {};
}

// Operations whose result is an integer or a selection of bits: there a NaN is a pattern like any other.
bool is_bitwise(const std::string& name) {
  return name.ends_with("_i32") || name.starts_with("shift") || name == "to_bf16" || name == "is_nan";
}

bool same(float a, float b, bool bitwise) {
  if (!bitwise && std::isnan(a) && std::isnan(b)) return true;
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

// max |f(x) - reference(x)| in ulps of the result and absolutely, over x in [low, high].
struct Error {
  double ulps = 0, absolute = 0;
};
template <class Reference>
Error measure(const Level& level, const std::string& name, float low, float high, Reference reference) {
  Rng rng(7);
  std::vector<float> x(1 << 20);
  rng.fill_uniform(x, low, high);
  const std::vector<float> y = run(level, name, x, x, x);
  Error error;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = reference(static_cast<double>(x[i])), difference = std::abs(y[i] - exact);
    const float magnitude = std::max(std::abs(static_cast<float>(exact)), std::numeric_limits<float>::min());
    const double ulp =
        static_cast<double>(std::nextafter(magnitude, kInfinity)) - static_cast<double>(magnitude);
    CHECK(std::isfinite(difference), name, " of ", x[i], " is ", y[i]);
    error.ulps = std::max(error.ulps, difference / ulp);
    error.absolute = std::max(error.absolute, difference);
  }
  return error;
}

double gelu(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }
double gelu_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}
double silu(double x) { return x / (1 + std::exp(-x)); }

}  // namespace

ENCAST_TEST(every_level_gives_the_same_bits) {
  const std::vector<Level> all = levels();
  const std::vector<float> a = sample(1, 1 << 18), b = sample(2, 1 << 18), c = sample(3, 1 << 18);
  std::vector<float> shifted = b;  // special values meet each other in all pairs of neighbours
  std::rotate(shifted.begin(), shifted.begin() + 5, shifted.end());
  for (int p = 0; p < all[0].table.count; ++p) {
    const Probe& first = all[0].table.probes[p];
    const std::vector<float> expected = run(first, a, shifted, c);
    for (const Level& level : all) {
      const std::vector<float> got = run(level, first.name, a, shifted, c);
      for (size_t i = 0; i < a.size(); ++i) {
        CHECK(same(expected[i], got[i], is_bitwise(first.name)), first.name, " on ", level.name, " and ",
              all[0].name, ": ", got[i], " and ", expected[i], " for ", a[i], ", ", shifted[i], ", ", c[i]);
      }
    }
  }
}

ENCAST_TEST(operations_are_what_the_contract_says) {
  const std::vector<float> a = sample(4, 1 << 14), b = sample(5, 1 << 14), c = sample(6, 1 << 14);
  const auto as_int = [](float x) { return std::bit_cast<int32_t>(x); };
  const auto from_int = [](int64_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x)); };
  const auto check = [&](const char* name, auto expected) {
    for (const Level& level : levels()) {
      const std::vector<float> got = run(level, name, a, b, c);
      for (size_t i = 0; i < a.size(); ++i) {
        const float want = expected(a[i], b[i], c[i]);
        CHECK(same(want, got[i], is_bitwise(name)), name, " on ", level.name, ": ", got[i], " instead of ",
              want, " for ", a[i], ", ", b[i], ", ", c[i]);
      }
    }
  };
  check("add", [](float x, float y, float) { return x + y; });
  check("subtract", [](float x, float y, float) { return x - y; });
  check("multiply", [](float x, float y, float) { return x * y; });
  check("divide", [](float x, float y, float) { return x / y; });
  check("fma", [](float x, float y, float z) { return std::fma(x, y, z); });
  check("fnma", [](float x, float y, float z) { return std::fma(-x, y, z); });
  check("max", [](float x, float y, float) { return x > y ? x : y; });
  check("min", [](float x, float y, float) { return x < y ? x : y; });
  check("abs", [](float x, float, float) { return std::fabs(x); });
  check("sqrt", [](float x, float, float) { return std::sqrt(x); });
  check("round", [](float x, float, float) { return std::nearbyint(x); });
  check("to_i32", [&](float x, float, float) {
    const bool inside = x >= -0x1p31f && x < 0x1p31f;
    return from_int(inside ? static_cast<int64_t>(std::nearbyint(x)) : std::numeric_limits<int32_t>::min());
  });
  check("to_f32", [&](float x, float, float) { return static_cast<float>(as_int(x)); });
  check("add_i32", [&](float x, float y, float) { return from_int(int64_t{as_int(x)} + as_int(y)); });
  check("subtract_i32", [&](float x, float y, float) { return from_int(int64_t{as_int(x)} - as_int(y)); });
  check("multiply_i32", [&](float x, float y, float) { return from_int(int64_t{as_int(x)} * as_int(y)); });
  check("and_i32", [&](float x, float y, float) { return from_int(as_int(x) & as_int(y)); });
  check("or_i32", [&](float x, float y, float) { return from_int(as_int(x) | as_int(y)); });
  check("xor_i32", [&](float x, float y, float) { return from_int(as_int(x) ^ as_int(y)); });
  check("max_i32", [&](float x, float y, float) { return from_int(std::max(as_int(x), as_int(y))); });
  check("min_i32", [&](float x, float y, float) { return from_int(std::min(as_int(x), as_int(y))); });
  check("shift_left", [&](float x, float, float) { return from_int(int64_t{as_int(x)} << 5); });
  check("shift_right",
        [&](float x, float, float) { return from_int(static_cast<uint32_t>(as_int(x)) >> 5); });
  check("less", [](float x, float y, float) { return x < y ? 1.0f : 0.0f; });
  check("less_equal", [](float x, float y, float) { return x <= y ? 1.0f : 0.0f; });
  check("is_nan", [&](float x, float, float) { return from_int(std::isnan(x) ? 1 : 0); });
  check("times_power_of_2", [](float x, float y, float) {
    const float mantissa = std::bit_cast<float>((std::bit_cast<uint32_t>(x) & 0x7fffff) | 0x3f800000);
    const float n =
        std::nearbyint(250.0f * (std::fabs(y) < 1.0f ? std::fabs(y) : 1.0f) * std::copysign(1.0f, y));
    return std::ldexp(mantissa, static_cast<int>(n));
  });
}

ENCAST_TEST(bf16_is_the_nearest_and_ties_go_to_even) {
  // Every pattern of the upper half, with lower halves below, at and above the tie.
  std::vector<float> x;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      x.push_back(std::bit_cast<float>(high << 16 | low));
  }
  CHECK_EQ(x.size() % 16, size_t{0});
  for (const Level& level : levels()) {
    const std::vector<float> codes = run(level, "to_bf16", x, x, x),
                             values = run(level, "bf16_round_trip", x, x, x);
    for (size_t i = 0; i < x.size(); ++i) {
      const uint32_t code = std::bit_cast<uint32_t>(codes[i]);
      CHECK(std::bit_cast<uint32_t>(values[i]) == code << 16, level.name, " ", x[i]);
      if (std::isnan(x[i])) {
        CHECK((code & 0x7fc0) == 0x7fc0, level.name, " NaN became ", code);
        continue;
      }
      const uint32_t down = std::bit_cast<uint32_t>(x[i]) >> 16;
      const uint32_t low = std::bit_cast<uint32_t>(x[i]) & 0xffff;
      const uint32_t want = low > 0x8000 || (low == 0x8000 && down % 2 == 1) ? down + 1 : down;
      CHECK_EQ(code, want, level.name, " ", x[i]);
    }
  }
}

ENCAST_TEST(reductions_fold_halves) {
  Rng rng(8);
  std::vector<float> x(1 << 12);
  for (float& value : x) value = rng.uniform() * std::exp2(static_cast<float>(rng.integer(-12, 12)));
  for (const Level& level : levels()) {
    const std::vector<float> sums = run(level, "reduce_add", x, x, x),
                             largest = run(level, "reduce_max", x, x, x);
    for (size_t i = 0; i < x.size(); i += 16) {
      float tree[16];
      std::copy_n(x.begin() + static_cast<std::ptrdiff_t>(i), 16, tree);
      for (int width = 8; width > 0; width /= 2) {
        for (int lane = 0; lane < width; ++lane) tree[lane] += tree[lane + width];
      }
      CHECK_SAME_BITS(tree, &sums[i], 1, level.name);
      CHECK_EQ(largest[i], *std::max_element(x.begin() + static_cast<std::ptrdiff_t>(i),
                                             x.begin() + static_cast<std::ptrdiff_t>(i) + 16));
    }
  }
}

ENCAST_TEST(partial_vectors_touch_only_their_lanes) {
  for (const Level& level : levels()) {
    for (int64_t n = 0; n <= 16; ++n) {
      GuardedBuffer<float> in(static_cast<size_t>(n)), out(static_cast<size_t>(n)),
          behind(static_cast<size_t>(n), 16);
      for (int64_t i = 0; i < n; ++i) in[static_cast<size_t>(i)] = static_cast<float>(i) + 0.5f;
      float lanes[16];
      level.table.partial(in.data(), n, -7.0f, lanes, out.data());
      for (int64_t i = 0; i < 16; ++i)
        CHECK_EQ(lanes[i], i < n ? static_cast<float>(i) + 0.5f : -7.0f, level.name);
      for (int64_t i = 0; i < n; ++i)
        CHECK_EQ(out[static_cast<size_t>(i)], static_cast<float>(i) + 1.5f, level.name);
      level.table.partial(in.data(), n, 0.0f, lanes, behind.data());
      CHECK(behind.check_slack(), level.name, " n=", n);
    }
  }
}

ENCAST_TEST(bytes_saturate) {
  const int32_t lanes[16] = {
      0,  1,    127,  128,    255,   256,   257,        32767,
      -1, -128, -256, -32768, 32768, 65536, 2147483647, std::numeric_limits<int32_t>::min()};
  for (const Level& level : levels()) {
    GuardedBuffer<uint8_t> out(16);
    level.table.store_u8(lanes, out.data());
    for (size_t i = 0; i < 16; ++i)
      CHECK_EQ(int{out[i]}, std::clamp(lanes[i], 0, 255), level.name, " lane ", i);
  }
}

ENCAST_TEST(transpose_exchanges_rows_and_lanes) {
  float in[256], out[256];
  for (int i = 0; i < 256; ++i) in[i] = static_cast<float>(i);
  for (const Level& level : levels()) {
    level.table.transpose(in, out);
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 16; ++j) CHECK_EQ(out[16 * i + j], in[16 * j + i], level.name, " ", i, " ", j);
    }
  }
}

// The table of README.md.
ENCAST_TEST(polynomials_stay_within_their_errors) {
  for (const Level& level : levels()) {
    CHECK_LE(measure(level, "exp", -87.3f, 88.7f, [](double x) { return std::exp(x); }).ulps, 1.05,
             level.name);
    CHECK_LE(measure(level, "exp", -104.0f, -87.0f, [](double x) { return std::exp(x); }).absolute, 0x1p-149,
             level.name);
    CHECK_LE(measure(level, "erf", -4.5f, 4.5f, [](double x) { return std::erf(x); }).absolute, 3e-7,
             level.name);
    CHECK_LE(measure(level, "tanh", -10.0f, 10.0f, [](double x) { return std::tanh(x); }).ulps, 1.5,
             level.name);
    CHECK_LE(measure(level, "tanh", -1e-3f, 1e-3f, [](double x) { return std::tanh(x); }).ulps, 1.5,
             level.name);
    CHECK_LE(measure(level, "gelu", -12.0f, 0.0f, gelu).absolute, 5e-7, level.name);
    CHECK_LE(measure(level, "gelu", 0.0f, 12.0f, gelu).ulps, 4.0, level.name);
    CHECK_LE(measure(level, "gelu_tanh", -12.0f, 0.0f, gelu_tanh).absolute, 5e-8, level.name);
    CHECK_LE(measure(level, "gelu_tanh", 0.0f, 12.0f, gelu_tanh).ulps, 2.0, level.name);
    CHECK_LE(measure(level, "gelu_coarse", -12.0f, 12.0f, gelu).absolute, 9.5e-5, level.name);
    CHECK_LE(measure(level, "gelu_tanh_coarse", -12.0f, 12.0f, gelu_tanh).absolute, 9.5e-5, level.name);
    // Near zero, where a bf16 has absolute steps as small as one likes.
    CHECK_LE(measure(level, "gelu_coarse", 1e-6f, 1e-2f, gelu).ulps, 0x1p-9 / 0x1p-23, level.name);
    CHECK_LE(measure(level, "gelu_tanh_coarse", 1e-6f, 1e-2f, gelu_tanh).ulps, 0x1p-9 / 0x1p-23, level.name);
    CHECK_LE(measure(level, "silu", -100.0f, 0.0f, silu).absolute, 5e-8, level.name);
    CHECK_LE(measure(level, "silu", 0.0f, 100.0f, silu).ulps, 1.8, level.name);
  }
}

ENCAST_TEST(exact_forms_round_once) {
  for (const Level& level : levels()) {
    CHECK_LE(measure(level, "exp_exact", -87.3f, 88.7f, [](double x) { return std::exp(x); }).ulps, 0.501,
             level.name);
    CHECK_LE(measure(level, "tanh_exact", -10.0f, 10.0f, [](double x) { return std::tanh(x); }).ulps, 0.501,
             level.name);
    CHECK_LE(measure(level, "gelu_exact", -12.0f, 12.0f, gelu).ulps, 0.501, level.name);
    CHECK_LE(measure(level, "gelu_tanh_exact", -3.0f, 12.0f, gelu_tanh).ulps, 0.501, level.name);
    CHECK_LE(measure(level, "silu_exact", -80.0f, 80.0f, silu).ulps, 0.501, level.name);
  }
}

ENCAST_TEST(limits_of_functions) {
  struct Case {
    const char* name;
    float at_minus_infinity, at_infinity;
  };
  const Case cases[] = {{"exp", 0.0f, kInfinity},
                        {"erf", -1.0f, 1.0f},
                        {"tanh", -1.0f, 1.0f},
                        {"gelu", -0.0f, kInfinity},
                        {"gelu_tanh", -0.0f, kInfinity},
                        {"silu", -0.0f, kInfinity},
                        {"relu", 0.0f, kInfinity},
                        {"gelu_coarse", 0.0f, kInfinity},
                        {"gelu_tanh_coarse", 0.0f, kInfinity},
                        {"exp_exact", 0.0f, kInfinity},
                        {"tanh_exact", -1.0f, 1.0f},
                        {"gelu_exact", -0.0f, kInfinity},
                        {"gelu_tanh_exact", -0.0f, kInfinity},
                        {"silu_exact", -0.0f, kInfinity}};
  for (const Level& level : levels()) {
    for (const Case& one : cases) {
      std::vector<float> x(16, 0.0f);
      x[0] = -kInfinity;
      x[1] = kInfinity;
      x[2] = kNan;
      x[3] = -0.0f;
      x[4] = -1e30f;
      x[5] = 1e30f;
      const std::vector<float> y = run(level, one.name, x, x, x);
      const bool is_exp = std::string(one.name).starts_with("exp");
      CHECK_SAME_BITS(&y[0], &one.at_minus_infinity, 1, level.name, " ", one.name);
      CHECK_SAME_BITS(&y[1], &one.at_infinity, 1, level.name, " ", one.name);
      CHECK(std::isnan(y[2]), level.name, " ", one.name);
      CHECK_EQ(y[3], is_exp ? 1.0f : 0.0f, level.name, " ", one.name);
      CHECK_EQ(std::signbit(y[3]), !is_exp, level.name, " ", one.name);
      CHECK_EQ(y[4], one.at_minus_infinity, level.name, " ", one.name);
      CHECK_EQ(y[5], one.at_infinity == kInfinity && !is_exp ? 1e30f : one.at_infinity, level.name, " ",
               one.name);
    }
  }
}

ENCAST_TEST_MAIN
