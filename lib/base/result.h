// SPDX-License-Identifier: Apache-2.0
// Errors as values. A Result<T> holds a T or an Error; a Status holds nothing or an Error.
//
// Not exceptions: damaged input is ordinary for this program, worker threads return errors as values, and ranks must
// agree on an error before each collective. The names follow std::expected, so that it can replace this file once all
// our compilers have it.
//
//   Result<File> f = File::open(path);
//   auto file = TRY(File::open(path));     // returns the error to the caller, or yields the File
//   TRY(file.read_at(0, buffer));
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace reshard {

// The kind of an error. The values are the program's exit codes (docs/cli.md).
enum class ErrorCode : int {
  kDifference = 1,   // two checkpoints differ, or an audit found something
  kUsage = 2,        // the request makes no sense
  kCorrupt = 3,      // the bytes contradict the format or each other
  kUnsupported = 4,  // valid but not supported; the message says what would be needed
  kIo = 5,           // not found, or the operating system refused
  kPeer = 6,         // another rank failed
  kInternal = 70,    // a bug in reshard
};

class [[nodiscard]] Error {
 public:
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // Prepends "what: ", so that the outermost context comes first.
  Error context(std::string_view what) && {
    message_.insert(0, std::string(what) + ": ");
    return std::move(*this);
  }

 private:
  ErrorCode code_;
  std::string message_;
};

inline Error usage_error(std::string m) { return {ErrorCode::kUsage, std::move(m)}; }
inline Error corrupt(std::string m) { return {ErrorCode::kCorrupt, std::move(m)}; }
inline Error unsupported(std::string m) { return {ErrorCode::kUnsupported, std::move(m)}; }
inline Error io_error(std::string m) { return {ErrorCode::kIo, std::move(m)}; }
inline Error internal_error(std::string m) { return {ErrorCode::kInternal, std::move(m)}; }

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool has_value() const { return state_.index() == 0; }
  // Not for a Result<bool>: `if (path_exists(p))` would be true for the answer no.
  explicit operator bool() const requires(!std::same_as<T, bool>) { return has_value(); }

  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  // Values, not references, so that `for (x : *f())` keeps what it iterates over.
  T value() && { return std::get<0>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  const Error& error() const& { return std::get<1>(state_); }
  Error&& error() && { return std::get<1>(std::move(state_)); }

  Result context(std::string_view what) && {
    if (has_value()) return std::move(*this);
    return std::move(*this).error().context(what);
  }
  // Prepends the result of `what()`, which is called only if there is an error.
  template <std::invocable What>
  Result context(const What& what) && {
    if (has_value()) return std::move(*this);
    return std::move(*this).error().context(what());
  }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool has_value() const { return !error_.has_value(); }
  explicit operator bool() const { return has_value(); }
  void value() const {}
  void operator*() const {}

  const Error& error() const& { return *error_; }
  Error&& error() && { return *std::move(error_); }

  Result context(std::string_view what) && {
    if (has_value()) return {};
    return std::move(*error_).context(what);
  }
  template <std::invocable What>
  Result context(const What& what) && {
    if (has_value()) return {};
    return std::move(*error_).context(what());
  }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

}  // namespace reshard

// Yields the value of a Result, or returns its error from the enclosing function. It is a statement expression (gcc,
// clang, nvcc), so that one macro serves `TRY(f());` and `auto x = TRY(f());`. Every use has a variable name of its
// own, because a TRY may be in a lambda inside another TRY.
#define TRY(...) RESHARD_TRY_NUMBERED(__COUNTER__, __VA_ARGS__)
#define RESHARD_TRY_NUMBERED(n, ...) RESHARD_TRY_NAMED(n, __VA_ARGS__)
#define RESHARD_TRY_NAMED(n, ...)                                              \
  __extension__({                                                              \
    auto try_result_##n = (__VA_ARGS__);                                       \
    if (!try_result_##n.has_value()) return std::move(try_result_##n).error(); \
    *std::move(try_result_##n);                                                \
  })
