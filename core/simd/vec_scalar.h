#pragma once

// F32x16 as an array of floats. Included by vec.h, which holds the contract.
// fma is the C library's (correctly rounded, by instruction or in software), so that bits agree.
#define ENCAST_SIMD_LEVEL scalar
#define ENCAST_SIMD_IS_SCALAR

namespace encast {
inline namespace scalar {

struct F32x16 {
  float lane[16];
};
struct I32x16 {
  int32_t lane[16];
};
struct Mask16 {
  bool lane[16];
};

// Every lane of a new vector of type T; `i` is the lane in `expression`.
#define ENCAST_LANES(T, expression)                         \
  T result;                                                 \
  for (int i = 0; i < 16; ++i) result.lane[i] = expression; \
  return result

ENCAST_SIMD int32_t float_bits(float x) {
  int32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}
ENCAST_SIMD float float_from_bits(int32_t u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}
ENCAST_SIMD uint32_t wrap(int32_t x) { return static_cast<uint32_t>(x); }
ENCAST_SIMD int32_t unwrap(uint32_t x) { return static_cast<int32_t>(x); }

ENCAST_SIMD Mask16 first_lanes(int64_t n) { ENCAST_LANES(Mask16, i < n); }

ENCAST_SIMD F32x16 set1(float x) { ENCAST_LANES(F32x16, x); }
ENCAST_SIMD I32x16 set1(int32_t x) { ENCAST_LANES(I32x16, x); }

ENCAST_SIMD F32x16 load(const float* p) { ENCAST_LANES(F32x16, p[i]); }
ENCAST_SIMD F32x16 load_partial(const float* p, int64_t n, float fill = 0) {
  ENCAST_LANES(F32x16, i < n ? p[i] : fill);
}
ENCAST_SIMD void store(float* p, F32x16 a) { __builtin_memcpy(p, a.lane, sizeof a.lane); }
ENCAST_SIMD void store_partial(float* p, int64_t n, F32x16 a) {
  for (int i = 0; i < n; ++i) p[i] = a.lane[i];
}
ENCAST_SIMD I32x16 load_i32(const int32_t* p) { ENCAST_LANES(I32x16, p[i]); }
ENCAST_SIMD void store_i32(int32_t* p, I32x16 a) { __builtin_memcpy(p, a.lane, sizeof a.lane); }
ENCAST_SIMD I32x16 load_u8(const uint8_t* p) { ENCAST_LANES(I32x16, p[i]); }
ENCAST_SIMD void store_u8(uint8_t* p, I32x16 a) {
  for (int i = 0; i < 16; ++i) {
    const int32_t x = a.lane[i];
    p[i] = static_cast<uint8_t>(x < 0 ? 0 : x > 255 ? 255 : x);
  }
}
ENCAST_SIMD I32x16 load_u16(const uint16_t* p) { ENCAST_LANES(I32x16, p[i]); }
// Lanes are 0 to 65535.
ENCAST_SIMD void store_u16(uint16_t* p, I32x16 a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(a.lane[i]);
}

ENCAST_SIMD F32x16 operator+(F32x16 a, F32x16 b) { ENCAST_LANES(F32x16, a.lane[i] + b.lane[i]); }
ENCAST_SIMD F32x16 operator-(F32x16 a, F32x16 b) { ENCAST_LANES(F32x16, a.lane[i] - b.lane[i]); }
ENCAST_SIMD F32x16 operator*(F32x16 a, F32x16 b) { ENCAST_LANES(F32x16, a.lane[i] * b.lane[i]); }
ENCAST_SIMD F32x16 operator/(F32x16 a, F32x16 b) { ENCAST_LANES(F32x16, a.lane[i] / b.lane[i]); }
ENCAST_SIMD F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  ENCAST_LANES(F32x16, __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]));
}
ENCAST_SIMD F32x16 fnma(F32x16 a, F32x16 b, F32x16 c) {
  ENCAST_LANES(F32x16, __builtin_fmaf(-a.lane[i], b.lane[i], c.lane[i]));
}
ENCAST_SIMD F32x16 max(F32x16 a, F32x16 b) {
  ENCAST_LANES(F32x16, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]);
}
ENCAST_SIMD F32x16 min(F32x16 a, F32x16 b) {
  ENCAST_LANES(F32x16, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]);
}
ENCAST_SIMD F32x16 abs(F32x16 a) { ENCAST_LANES(F32x16, __builtin_fabsf(a.lane[i])); }
ENCAST_SIMD F32x16 sqrt(F32x16 a) { ENCAST_LANES(F32x16, __builtin_sqrtf(a.lane[i])); }
ENCAST_SIMD F32x16 round(F32x16 a) { ENCAST_LANES(F32x16, __builtin_nearbyintf(a.lane[i])); }
ENCAST_SIMD I32x16 to_i32(F32x16 a) {
  ENCAST_LANES(I32x16, a.lane[i] >= -2147483648.0f && a.lane[i] < 2147483648.0f
                           ? static_cast<int32_t>(__builtin_nearbyintf(a.lane[i]))
                           : INT32_MIN);
}
ENCAST_SIMD F32x16 to_f32(I32x16 a) { ENCAST_LANES(F32x16, static_cast<float>(a.lane[i])); }
ENCAST_SIMD I32x16 bits(F32x16 a) { ENCAST_LANES(I32x16, float_bits(a.lane[i])); }
ENCAST_SIMD F32x16 from_bits(I32x16 a) { ENCAST_LANES(F32x16, float_from_bits(a.lane[i])); }

ENCAST_SIMD I32x16 operator+(I32x16 a, I32x16 b) {
  ENCAST_LANES(I32x16, unwrap(wrap(a.lane[i]) + wrap(b.lane[i])));
}
ENCAST_SIMD I32x16 operator-(I32x16 a, I32x16 b) {
  ENCAST_LANES(I32x16, unwrap(wrap(a.lane[i]) - wrap(b.lane[i])));
}
ENCAST_SIMD I32x16 operator*(I32x16 a, I32x16 b) {
  ENCAST_LANES(I32x16, unwrap(wrap(a.lane[i]) * wrap(b.lane[i])));
}
ENCAST_SIMD I32x16 operator&(I32x16 a, I32x16 b) { ENCAST_LANES(I32x16, a.lane[i] & b.lane[i]); }
ENCAST_SIMD I32x16 operator|(I32x16 a, I32x16 b) { ENCAST_LANES(I32x16, a.lane[i] | b.lane[i]); }
ENCAST_SIMD I32x16 operator^(I32x16 a, I32x16 b) { ENCAST_LANES(I32x16, a.lane[i] ^ b.lane[i]); }
ENCAST_SIMD I32x16 max(I32x16 a, I32x16 b) {
  ENCAST_LANES(I32x16, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]);
}
ENCAST_SIMD I32x16 min(I32x16 a, I32x16 b) {
  ENCAST_LANES(I32x16, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]);
}
template <int s>
ENCAST_SIMD I32x16 shift_left(I32x16 a) {
  ENCAST_LANES(I32x16, unwrap(wrap(a.lane[i]) << s));
}
template <int s>
ENCAST_SIMD I32x16 shift_right(I32x16 a) {
  ENCAST_LANES(I32x16, unwrap(wrap(a.lane[i]) >> s));
}

ENCAST_SIMD Mask16 less(F32x16 a, F32x16 b) { ENCAST_LANES(Mask16, a.lane[i] < b.lane[i]); }
ENCAST_SIMD Mask16 less_equal(F32x16 a, F32x16 b) { ENCAST_LANES(Mask16, a.lane[i] <= b.lane[i]); }
ENCAST_SIMD Mask16 is_nan(F32x16 a) { ENCAST_LANES(Mask16, a.lane[i] != a.lane[i]); }
ENCAST_SIMD F32x16 select(Mask16 m, F32x16 a, F32x16 b) {
  ENCAST_LANES(F32x16, m.lane[i] ? a.lane[i] : b.lane[i]);
}
ENCAST_SIMD I32x16 select(Mask16 m, I32x16 a, I32x16 b) {
  ENCAST_LANES(I32x16, m.lane[i] ? a.lane[i] : b.lane[i]);
}

ENCAST_SIMD F32x16 lookup(const float* table, I32x16 a) { ENCAST_LANES(F32x16, table[a.lane[i] & 15]); }

// Two factors, because 2^n alone may lie outside of f32: the first product is exact, the second rounds.
ENCAST_SIMD F32x16 times_power_of_2(F32x16 a, F32x16 n) {
  F32x16 result;
  const I32x16 whole = to_i32(n);
  for (int i = 0; i < 16; ++i) {
    const int32_t half = whole.lane[i] >> 1;
    const float first = float_from_bits(unwrap(wrap(half + 127) << 23));
    const float second = float_from_bits(unwrap(wrap(whole.lane[i] - half + 127) << 23));
    result.lane[i] = a.lane[i] * first * second;
  }
  return result;
}

ENCAST_SIMD float reduce_add(F32x16 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.lane[i] = a.lane[i] + a.lane[i + width];
  }
  return a.lane[0];
}
ENCAST_SIMD float reduce_max(F32x16 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.lane[i] = a.lane[i] > a.lane[i + width] ? a.lane[i] : a.lane[i + width];
  }
  return a.lane[0];
}
ENCAST_SIMD int32_t reduce_max(I32x16 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.lane[i] = a.lane[i] > a.lane[i + width] ? a.lane[i] : a.lane[i + width];
  }
  return a.lane[0];
}

#undef ENCAST_LANES

}  // namespace scalar
}  // namespace encast
