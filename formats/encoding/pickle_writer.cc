// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/pickle_writer.h"

#include <bit>
#include <cassert>
#include <utility>

#include "lib/base/text.h"
#include "lib/layout/dtype.h"

namespace reshard::pickle {
namespace {

void append_little_endian(std::string& out, std::uint64_t v, int bytes) {
  out.append(reinterpret_cast<const char*>(&v), static_cast<std::size_t>(bytes));
}

}  // namespace

PickleWriter::PickleWriter() : out_("\x80\x02", 2) {}

void PickleWriter::integer(Index v) {
  if (v >= 0 && v < 256) {
    op('K');
    append_little_endian(out_, static_cast<std::uint64_t>(v), 1);
  } else if (v >= 0 && v < 65536) {
    op('M');
    append_little_endian(out_, static_cast<std::uint64_t>(v), 2);
  } else if (v >= INT32_MIN && v <= INT32_MAX) {
    op('J');
    append_little_endian(out_, static_cast<std::uint64_t>(v), 4);
  } else {
    int bytes = 5;  // the fewest bytes that keep the sign
    while (bytes < 8 && (v >> (8 * bytes - 1)) != 0 && (v >> (8 * bytes - 1)) != -1) ++bytes;
    op('\x8a');
    out_ += static_cast<char>(bytes);
    append_little_endian(out_, static_cast<std::uint64_t>(v), bytes);
  }
}

void PickleWriter::big_integer(std::string_view bytes) {
  assert(bytes.size() <= UINT8_MAX);
  op('\x8a');
  out_ += static_cast<char>(bytes.size());
  out_ += bytes;
}

void PickleWriter::number(double v) {
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(v);
  op('G');
  for (int shift = 56; shift >= 0; shift -= 8) out_ += static_cast<char>(bits >> shift);
}

void PickleWriter::text(std::string_view s) {
  assert(s.size() <= UINT32_MAX);
  op('X');
  append_little_endian(out_, s.size(), 4);
  out_ += s;
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  op('c');
  out_.append(module).append(1, '\n').append(name).append(1, '\n');
}

std::pair<std::uint32_t, bool> PickleWriter::get_shared() {
  const auto [it, is_new] = shared_.try_emplace(key_, next_memo_);
  if (!is_new) get(it->second);
  return {it->second, !is_new};
}

std::uint32_t PickleWriter::shared_text(std::string_view s) {
  key_.assign("X").append(s);
  const auto [memo, is_there] = get_shared();
  if (is_there) return memo;
  text(s);
  return put();
}

std::uint32_t PickleWriter::shared_global(std::string_view module, std::string_view name) {
  key_.assign("c").append(module).append("\n").append(name);
  const auto [memo, is_there] = get_shared();
  if (is_there) return memo;
  global(module, name);
  return put();
}

void PickleWriter::tuple_of_last(int n) {
  assert(n >= 1 && n <= 3);
  op(static_cast<char>(0x84 + n));
}

void PickleWriter::integers(std::span<const Index> v) {
  if (v.empty()) return empty_tuple();
  if (v.size() > 3) mark();
  for (Index i : v) integer(i);
  if (v.size() > 3) return tuple_from_mark();
  tuple_of_last(static_cast<int>(v.size()));
}

void PickleWriter::empty_ordered_dict() {
  global("collections", "OrderedDict");
  empty_tuple();
  reduce();
}

std::uint32_t PickleWriter::put() {
  const std::uint32_t memo = next_memo_++;
  op(memo < 256 ? 'q' : 'r');
  append_little_endian(out_, memo, memo < 256 ? 1 : 4);
  return memo;
}

void PickleWriter::get(std::uint32_t memo) {
  op(memo < 256 ? 'h' : 'j');
  append_little_endian(out_, memo, memo < 256 ? 1 : 4);
}

void PickleWriter::end(char code) noexcept {
  try {
    op(code);
  } catch (const std::bad_alloc&) {
    lacks_memory_ = true;
  }
}

std::string PickleWriter::take() {
  taken_ += held();
  return std::exchange(out_, std::string());
}

std::string PickleWriter::finish() && {
  check_whole();
  op('.');
  return std::move(out_);
}

namespace {

constexpr int kMaxDepth = 64;

class ValueWriter {
 public:
  ValueWriter(PickleWriter& w, Index max_bytes) : w_(w), max_bytes_(max_bytes) {}

  Status write(Value v, int depth) {
    if (depth > kMaxDepth) return unsupported("containers nested deeper than " + std::to_string(kMaxDepth) + " levels");
    if (w_.size() > max_bytes_) return unsupported("a value whose pickle exceeds " + bytes_of(max_bytes_));
    switch (v.kind()) {
      case Kind::kNone:
        w_.none();
        return {};
      case Kind::kBool:
        w_.boolean(*v.as_bool());
        return {};
      case Kind::kInt:
        w_.integer(*v.as_int());
        return {};
      case Kind::kFloat:
        w_.number(*v.as_float());
        return {};
      case Kind::kString:
        w_.text(*v.as_string());
        return {};
      case Kind::kBigInt:
        return big_integer(v);
      case Kind::kBytes:
        bytes(*v.as_bytes());
        return {};
      case Kind::kTuple:
        return tuple(v, depth);
      case Kind::kList:
        return list(v, depth);
      case Kind::kDict:
        return dict(v, depth);
      case Kind::kSet:
        return set(v, depth);
      case Kind::kObject:
        if (is_empty_bytes(v)) {
          bytes("");
          return {};
        }
        if (makes_data(v)) return call(v, depth);
        if (makes_numpy_data(v)) return call_and_build(v, depth);
        break;
      case Kind::kGlobal:
        if ((v.module() == "torch" && dtype_from_torch(v.name())) || v.is_global("numpy", "ndarray")) {
          w_.global(v.module(), v.name());
          return {};
        }
        break;
      default:
        break;
    }
    return unsupported("unsupported value: " + std::string(kind_name(v.kind())) + " " + print(v, 1, 2));
  }

 private:
  static bool is_plain_call(Value v) { return v.state().is_none() && v.keywords().is_none() && v.items().is_none(); }

  // Returns whether this calls a builtin of that name. Protocol 2 calls the module by its name of Python 2.
  static bool calls_builtin(Value v, std::string_view name) {
    return is_plain_call(v) && (v.callee().is_global("builtins", name) || v.callee().is_global("__builtin__", name));
  }

  // Protocol 2 has b'' as the call bytes(). We write it like other bytes, because torch.load with weights_only does not
  // accept the call.
  static bool is_empty_bytes(Value v) { return calls_builtin(v, "bytes") && v.args().size() == 0; }

  // Writes calls that make data for which protocol 2 has no opcodes.
  static bool makes_data(Value v) {
    if (calls_builtin(v, "set") || calls_builtin(v, "complex") || calls_builtin(v, "bytearray")) return true;
    return is_plain_call(v) && (v.callee().is_global("_codecs", "encode") || v.callee().is_global("torch", "device"));
  }

  // Arrays and scalars of numpy, and their dtypes:
  //   numpy._core.multiarray._reconstruct(numpy.ndarray, (0,), b'b') with the state (1, (624,), dtype, False, b'...')
  // (numpy/_core/src/multiarray/methods.c, array_reduce; numpy.core before 2.0)
  static bool makes_numpy_data(Value v) {
    const Value callee = v.callee();
    if (!v.keywords().is_none() || !v.items().is_none()) return false;
    const bool is_array = callee.module() == "numpy.core.multiarray" || callee.module() == "numpy._core.multiarray";
    return (is_array && (callee.name() == "_reconstruct" || callee.name() == "scalar")) ||
           callee.is_global("numpy", "dtype");
  }

  Status call_and_build(Value v, int depth) {
    TRY(call(v, depth));
    if (v.state().is_none()) return {};
    TRY(write(v.state(), depth + 1));
    w_.build();
    return {};
  }

  Status call(Value v, int depth) {
    w_.global(v.callee().module(), v.callee().name());
    TRY(tuple(v.args(), depth));
    w_.reduce();
    return {};
  }

  Status big_integer(Value v) {
    const std::string_view digits = *v.as_big_int();
    if (digits.size() > UINT8_MAX)
      return unsupported("an int of " + bytes_of(std::ssize(digits)) + "; at most 255 are supported");
    w_.big_integer(digits);
    return {};
  }

  // Protocol 2 has no opcode for bytes: they are a text with one character for each byte, which a codec decodes.
  void bytes(std::string_view b) {
    std::string text;
    for (const char c : b) {
      const auto v = static_cast<unsigned char>(c);
      if (v >= 0x80) text += static_cast<char>(0xC0 | v >> 6);
      text += v < 0x80 ? c : static_cast<char>(0x80 | (v & 0x3F));
    }
    w_.global("_codecs", "encode");
    w_.text(text);
    w_.text("latin1");
    w_.tuple_of_last(2);
    w_.reduce();
  }

  Status tuple(Value v, int depth) {
    if (v.size() == 0) {
      w_.empty_tuple();
      return {};
    }
    w_.mark();
    for (std::size_t i = 0; i < v.size(); ++i) TRY(write(v[i], depth + 1));
    w_.tuple_from_mark();
    return {};
  }

  Status list(Value v, int depth) {
    w_.empty_list();
    ElementRuns runs(w_, &PickleWriter::append_items);
    for (std::size_t i = 0; i < v.size(); ++i) {
      runs.next();
      TRY(write(v[i], depth + 1));
    }
    runs.end();
    return {};
  }

  Status dict(Value v, int depth) {
    w_.empty_dict();
    ElementRuns runs(w_, &PickleWriter::set_items);
    for (std::size_t i = 0; i < v.size(); ++i) {
      runs.next();
      TRY(write(v.key(i), depth + 1));
      TRY(write(v.value(i), depth + 1));
    }
    runs.end();
    return {};
  }

  Status set(Value v, int depth) {
    w_.global("__builtin__", "set");  // the name of builtins.set in protocol 2
    TRY(list(v, depth));
    w_.tuple_of_last(1);
    w_.reduce();
    return {};
  }

  PickleWriter& w_;
  Index max_bytes_;
};

}  // namespace

Status write_value(PickleWriter& w, Value value, Index max_bytes) { return ValueWriter(w, max_bytes).write(value, 0); }

}  // namespace reshard::pickle
