// SPDX-License-Identifier: Apache-2.0
// Prints values as short texts for people.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "formats/encoding/pickle.h"
#include "lib/base/text.h"

namespace reshard::pickle {
namespace {

constexpr std::size_t kMaxPrintedChars = 4000;

class Printer {
 public:
  Printer(int max_depth, int max_items) : max_depth_(max_depth), max_items_(max_items) {}

  void print(Value v, int depth) {
    if (full()) return;
    switch (v.kind()) {
      case Kind::kNone:
        out_ += "None";
        break;
      case Kind::kBool:
        out_ += *v.as_bool() ? "True" : "False";
        break;
      case Kind::kInt:
        out_ += std::to_string(*v.as_int());
        break;
      case Kind::kBigInt:
        out_ += v.big_int_text().substr(0, kMaxText);
        break;
      case Kind::kFloat:
        number(*v.as_float());
        break;
      case Kind::kString:
        text("'", *v.as_string());
        break;
      case Kind::kBytes:
        text("b'", *v.as_bytes());
        break;
      case Kind::kTuple:
        elements(v, depth, "(", v.size() == 1 ? ",)" : ")");
        break;
      case Kind::kList:
        elements(v, depth, "[", "]");
        break;
      case Kind::kSet:
        elements(v, depth, "{", "}");
        break;
      case Kind::kDict:
        elements(v, depth, "{", "}");
        break;
      case Kind::kGlobal:
        out_ += printable(v.module()) + "." + printable(v.name());
        break;
      case Kind::kObject:
        object(v, depth);
        break;
      case Kind::kPersistentId:
        wrapped("persistent_id(", v.persistent_id(), depth);
        break;
    }
  }

  std::string take() && { return std::move(out_); }

 private:
  static constexpr std::size_t kMaxText = 80;

  bool full() {
    if (out_.size() < kMaxPrintedChars) return false;
    if (!out_.ends_with("...")) out_ += "...";
    return true;
  }

  // Prints the shortest text that reads back as the same number.
  void number(double v) {
    char buffer[40];
    for (int digits = 1; digits <= 17; ++digits) {
      std::snprintf(buffer, sizeof buffer, "%.*g", digits, v);
      if (std::strtod(buffer, nullptr) == v) break;
    }
    out_ += buffer;
    if (std::isfinite(v) && out_.find_first_of(".e", out_.size() - std::strlen(buffer)) == std::string::npos)
      out_ += ".0";
  }

  void text(std::string_view open, std::string_view s) {
    out_ += open;
    out_ += printable(s.substr(0, kMaxText));
    out_ += s.size() > kMaxText ? "...'" : "'";
  }

  void elements(Value v, int depth, std::string_view open, std::string_view close) {
    out_ += open;
    const std::size_t shown = depth >= max_depth_ ? 0 : std::min(v.size(), max_items_);
    for (std::size_t i = 0; i < shown && !full(); ++i) {
      if (i > 0) out_ += ", ";
      if (v.kind() == Kind::kDict) {
        print(v.key(i), depth + 1);
        out_ += ": ";
        print(v.value(i), depth + 1);
      } else {
        print(v[i], depth + 1);
      }
    }
    if (shown < v.size()) out_ += shown > 0 ? ", ..." : "...";
    out_ += close;
  }

  void wrapped(std::string_view open, Value inner, int depth) {
    out_ += open;
    if (depth >= max_depth_) {
      out_ += "...";
    } else {
      print(inner, depth + 1);
    }
    out_ += ")";
  }

  // Prints the size of an io.BytesIO; in protocol 2 its bytes are an encoded text with one character for each byte.
  bool byte_stream(Value v) {
    const Value callee = v.callee(), state = v.state();
    if (callee.kind() != Kind::kGlobal || callee.module() != "_io" || callee.name() != "BytesIO") return false;
    if (state.kind() != Kind::kTuple || state.size() == 0) return false;
    const Value held = state[0];
    Index bytes = -1;
    if (held.kind() == Kind::kBytes) bytes = std::ssize(*held.as_bytes());
    if (held.kind() == Kind::kObject && held.args().kind() == Kind::kTuple && held.args().size() > 0)
      if (const auto characters = held.args()[0].as_string())
        bytes = std::count_if(characters->begin(), characters->end(),
                              [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
    if (bytes < 0) return false;
    out_ += "BytesIO, " + count_of(bytes, "byte");
    return true;
  }

  void object(Value v, int depth) {
    if (byte_stream(v)) return;
    if (depth >= max_depth_ && v.callee().kind() != Kind::kGlobal) {
      out_ += "...";
      return;
    }
    print(v.callee(), depth + 1);
    elements(v.args(), depth, "(", ")");
    if (!v.keywords().is_none()) wrapped(".keywords(", v.keywords(), depth);
    if (!v.items().is_none()) wrapped(".items(", v.items(), depth);
    if (!v.state().is_none()) wrapped(".state(", v.state(), depth);
  }

  int max_depth_;
  std::size_t max_items_;
  std::string out_;
};

}  // namespace

std::string print(Value value, int max_depth, int max_items) {
  Printer printer(std::min(max_depth, 64), std::max(max_items, 0));
  printer.print(value, 0);
  return std::move(printer).take();
}

}  // namespace reshard::pickle
