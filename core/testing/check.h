#pragma once
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "testing/random.h"

// The whole test framework: tests register themselves, a failed check ends its test, and the program
// closes with one line of counts. Header only, so that a test links nothing but the core.
//
//   ENCAST_TEST(rounds_to_even) { CHECK_EQ(round_even(2.5f), 2.0f); }
//   ENCAST_TEST_MAIN
//
// PROGRAM [SUBSTRING] runs the tests whose name contains SUBSTRING, PROGRAM --list names them.
// Exit status: 0 all passed, 1 a test failed, 77 every test was skipped (CTest's skip code), 2 no such test.
// A failed check throws, so it belongs in the test's own thread; other threads hand their findings back.
namespace encast::testing {

struct CheckFailure : std::exception {
  explicit CheckFailure(std::string text) : text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string text;
};

struct SkipTest : std::exception {
  explicit SkipTest(std::string reason) : reason(std::move(reason)) {}
  const char* what() const noexcept override { return reason.c_str(); }
  std::string reason;
};

struct TestCase {
  const char* name;
  void (*body)();
};

inline std::vector<TestCase>& registry() {
  static std::vector<TestCase> cases;
  return cases;
}

struct Registration {
  Registration(const char* name, void (*body)()) { registry().push_back({name, body}); }
};

// What a message says about a value; floats with all their digits, so that a failure can be replayed.
template <class T>
std::string describe(const T& value) {
  if constexpr (std::is_floating_point_v<T>) {
    char text[80];
    std::snprintf(text, sizeof text, "%.17g (%a)", static_cast<double>(value), static_cast<double>(value));
    return text;
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else if constexpr (std::is_integral_v<T>) {
    return std::to_string(value);
  } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
    return '"' + std::string(std::string_view(value)) + '"';
  } else if constexpr (std::is_pointer_v<T>) {
    std::ostringstream out;
    out << static_cast<const void*>(value);
    return out.str();
  } else {
    return "?";
  }
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
  throw CheckFailure(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

// C strings compare by their text, everything else by ==.
template <class A, class B>
bool equal(const A& a, const B& b) {
  if constexpr (std::is_convertible_v<const A&, std::string_view> &&
                std::is_convertible_v<const B&, std::string_view>) {
    return std::string_view(a) == std::string_view(b);
  } else {
    return a == b;
  }
}

template <class A, class B>
void check_eq(const A& a, const B& b, const char* text_a, const char* text_b, const std::string& note,
              const char* file, int line) {
  if (!equal(a, b)) {
    fail(file, line,
         std::string(text_a) + " == " + text_b + ": " + describe(a) + " and " + describe(b) + " " + note);
  }
}

template <class A, class B>
void check_le(const A& a, const B& b, const char* text_a, const char* text_b, const std::string& note,
              const char* file, int line) {
  if (!(a <= b)) {  // this way round a NaN fails
    fail(file, line,
         std::string(text_a) + " <= " + text_b + ": " + describe(a) + " and " + describe(b) + " " + note);
  }
}

// Compares bytes, so that -0 differs from 0 and a NaN equals itself.
template <class T>
void check_same_bits(const T* a, const T* b, size_t n, const std::string& note, const char* file, int line) {
  for (size_t i = 0; i < n; ++i) {
    if (std::memcmp(a + i, b + i, sizeof(T)) != 0) {
      fail(file, line,
           "element " + std::to_string(i) + " of " + std::to_string(n) + " differs: " + describe(a[i]) +
               " and " + describe(b[i]) + " " + note);
    }
  }
}

inline std::string note_of() { return {}; }

// Joins what a check wants to say beside its operands: CHECK_EQ(a, b, "m=", m, " n=", n).
template <class... Parts>
std::string note_of(const Parts&... parts) {
  std::ostringstream out;
  out << '[';
  ((out << parts), ...);
  out << ']';
  return out.str();
}

inline int run_tests(int argc, char** argv) {
  const std::string_view wanted = argc > 1 ? argv[1] : "";
  if (wanted == "--list") {
    for (const TestCase& test : registry()) std::printf("%s\n", test.name);
    return 0;
  }
  int passed = 0, failed = 0, skipped = 0;
  for (const TestCase& test : registry()) {
    if (std::string_view(test.name).find(wanted) == std::string_view::npos) continue;
    try {
      test.body();
      ++passed;
    } catch (const SkipTest& skip) {
      ++skipped;
      std::printf("SKIP %s: %s\n", test.name, skip.what());
    } catch (const std::exception& failure) {
      ++failed;
      std::printf("FAIL %s: %s\n     repeat with ENCAST_TEST_SEED=%llu %s %s\n", test.name, failure.what(),
                  static_cast<unsigned long long>(test_seed()), argv[0], test.name);
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed, %d skipped (seed %llu)\n", passed, failed, skipped,
              static_cast<unsigned long long>(test_seed()));
  if (failed > 0) return 1;
  if (passed == 0) return skipped > 0 ? 77 : 2;
  return 0;
}

}  // namespace encast::testing

#define ENCAST_TEST(name)                                                                             \
  static void encast_test_##name();                                                                   \
  static const ::encast::testing::Registration encast_registration_##name{#name, encast_test_##name}; \
  static void encast_test_##name()

#define ENCAST_TEST_MAIN \
  int main(int argc, char** argv) { return ::encast::testing::run_tests(argc, argv); }

// Everything after the operands is printed with a failure: CHECK(ok, "m=", m).
#define CHECK(condition, ...)                                                                           \
  do {                                                                                                  \
    if (!(condition)) {                                                                                 \
      ::encast::testing::fail(__FILE__, __LINE__,                                                       \
                              std::string(#condition) + " " + ::encast::testing::note_of(__VA_ARGS__)); \
    }                                                                                                   \
  } while (false)

#define CHECK_EQ(a, b, ...) \
  ::encast::testing::check_eq((a), (b), #a, #b, ::encast::testing::note_of(__VA_ARGS__), __FILE__, __LINE__)

#define CHECK_LE(a, b, ...) \
  ::encast::testing::check_le((a), (b), #a, #b, ::encast::testing::note_of(__VA_ARGS__), __FILE__, __LINE__)

#define CHECK_SAME_BITS(a, b, n, ...)                                                                  \
  ::encast::testing::check_same_bits((a), (b), (n), ::encast::testing::note_of(__VA_ARGS__), __FILE__, \
                                     __LINE__)

// Checks that the statement throws the type and that the message contains the text.
#define CHECK_THROWS(statement, Type, text)                                                                \
  do {                                                                                                     \
    std::string encast_caught = "nothing";                                                                 \
    bool encast_right = false;                                                                             \
    try {                                                                                                  \
      statement;                                                                                           \
    } catch (const Type& error) {                                                                          \
      encast_caught = error.what();                                                                        \
      encast_right = encast_caught.find(text) != std::string::npos;                                        \
    } catch (const std::exception& error) {                                                                \
      encast_caught = std::string("another type: ") + error.what();                                        \
    }                                                                                                      \
    if (!encast_right)                                                                                     \
      ::encast::testing::fail(                                                                             \
          __FILE__, __LINE__,                                                                              \
          #statement " should throw " #Type " with \"" + std::string(text) + "\", got: " + encast_caught); \
  } while (false)

#define SKIP_TEST(...) throw ::encast::testing::SkipTest(::encast::testing::note_of(__VA_ARGS__))
