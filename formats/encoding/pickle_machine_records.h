// SPDX-License-Identifier: Apache-2.0
// Reads objects of the classes of a RecordSink for the pickle machine (pickle_machine.cc). A run of such objects is
// parsed by its shape instead of opcode by opcode, passed to the sink and left out of the tree. Of the memo entries
// that these objects make, only torch.Sizes can be found again.
//
// Only the machine includes this. It is in an anonymous namespace so that functions with one caller are inlined.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/encoding/pickle_machine_state.h"
#include "formats/encoding/pickle_opcodes.h"
#include "formats/encoding/pickle_records.h"
#include "formats/encoding/pickle_tree.h"
#include "lib/layout/box.h"

namespace reshard::pickle::internal {
namespace {

class RecordReader : protected MachineState {
 protected:
  static constexpr const char* kNotSimple = "expected an object as simple as the others of its class";

  struct RecordRow {
    RecordClass what;
    Handle global = kUnset;
    std::array<Handle, kMaxRecordFields> names{};  // of its fields, once they were read
    std::size_t taken = 0;                         // objects
  };

  // `sink` may be null; otherwise it takes the objects of its classes.
  RecordReader(Tree& tree, const Limits& limits, RecordSink* sink) : MachineState(tree, limits), sink_(sink) {
    if (sink == nullptr) return;
    for (const RecordClass& c : sink->classes()) record_classes_.push_back({c, kUnset, {}, 0});
  }
  ~RecordReader() = default;

  bool has_sink() const { return sink_ != nullptr; }
  // Returns whether a missing memo entry may belong to an object that the sink took.
  bool has_records() const { return !record_memo_.empty(); }
  // Registers a new global, which may be a class of the sink.
  void note_global(std::string_view module, std::string_view name, Handle h) {
    for (RecordRow& c : record_classes_)
      if (c.what.module == module && c.what.name == name) c.global = h;
  }

  // After EMPTY_TUPLE, returns the sink's class on top of the stack if NEWOBJ follows, or null.
  RecordRow* record_begun() {
    if (sink_ == nullptr || stack_.size() == floor_) return nullptr;
    for (RecordRow& c : record_classes_) {
      if (c.global == kUnset || c.global != stack_.back()) continue;
      const std::size_t at = pos_;
      const bool is_new = next() == 0x81;
      pos_ = at;
      if (is_new) return &c;
    }
    return nullptr;
  }

  // Takes objects of one class, or keys and values in turn, as long as they follow each other.
  bool take_records(RecordRow& first) {
    pos_ = op_at_;
    if (memo_used_ != memo_.size()) return fail(kNotSimple);
    stack_.resize(stack_.size() - 1);
    RecordRow* last = &first;
    if (!begin_records(first) || !take_record(first)) return false;
    const std::size_t second = pos_;  // the first object may introduce the names of the fields
    if (first.what.value) {
      last = &record_classes_[*first.what.value];
      if (!record_follows(*last)) return true;
      if (!begin_records(*last) || !take_record(*last)) return false;
    }
    const auto key = std::find_if(record_classes_.begin(), record_classes_.end(),
                                  [&](const RecordRow& c) { return c.what.value == number_of(*last); });
    const bool is_dict = key != record_classes_.end();
    bool is_run = false;
    std::size_t released = second;
    for (; record_follows(is_dict ? *key : *last); is_run = true) {
      if (is_dict && (!take_record(*key) || !record_follows(*last))) return fail(kNotSimple);
      if (!take_record(*last)) return false;
      if (pos_ - released >= kReleasedBytes) tree_.text.release(std::exchange(released, pos_), pos_);
    }
    const std::size_t end = pos_;
    if (is_run && !skip(is_dict ? 'u' : 'e')) return fail(kNotSimple);
    pos_ = end;
    tree_.text.release(released, end);
    return true;
  }

  // Returns the torch.Size of an object that was taken, by its index in the memo.
  std::optional<Dims> record_size(std::uint32_t i) {
    if (record_memo_.empty()) return std::nullopt;
    if (!record_memo_[last_memo_].has(i)) {
      const auto after = std::upper_bound(record_memo_.begin(), record_memo_.end(), i,
                                          [](std::uint32_t at, const RecordMemo& m) { return at < m.first; });
      if (after == record_memo_.begin() || !after[-1].has(i)) return std::nullopt;
      last_memo_ = static_cast<std::size_t>(after - record_memo_.begin()) - 1;
    }
    const RecordMemo& m = record_memo_[last_memo_];
    const std::uint32_t object = (i - m.first) / m.stride, place = (i - m.first) % m.stride;
    for (std::size_t f = 0; f < m.sizes.size(); ++f)
      if (m.sizes[f] == place + 1) return sink_->size_of(m.cls, m.first_object + object, f);
    return std::nullopt;
  }

  bool push_size(const Dims& dims) {
    for (const Index n : dims)
      if (!is_small_int(n) || !push(small_int(n))) return fail(kNotSimple);
    return tuple_of_last(static_cast<std::uint32_t>(dims.rank()));
  }

 private:
  static constexpr std::size_t kReleasedBytes = 1 << 20;  // bytes of records to release at once

  // A run of objects with equally many memo entries. Only the positions of sizes among these entries are kept.
  struct RecordMemo {
    std::uint32_t first = 0;
    std::uint32_t stride = 0;
    std::uint32_t count = 0;
    std::size_t cls = 0;
    std::size_t first_object = 0;
    std::array<std::uint32_t, kMaxRecordFields>
        sizes{};  // for each field, 1 + its position among an object's entries, or 0

    bool has(std::uint32_t i) const { return i >= first && i - first < std::uint64_t{stride} * count; }
  };

  std::size_t number_of(const RecordRow& record) const {
    return static_cast<std::size_t>(&record - record_classes_.data());
  }

  // Reads the next opcode after any frame headers; returns 0 at the end.
  unsigned char next() {
    while (pos_ < size_) {
      const unsigned char op = raw_[pos_++];
      if (op != 0x95) return op;
      if (!frame()) return 0;
    }
    return 0;
  }
  bool skip(unsigned char wanted) {
    const std::size_t at = pos_;
    if (next() == wanted) return true;
    pos_ = at;
    return false;
  }
  // Skips these opcodes if they follow. `n` of them add memo entries.
  bool follows(std::string_view opcodes, std::uint32_t n) {
    if (size_ - pos_ < opcodes.size() || std::memcmp(raw_ + pos_, opcodes.data(), opcodes.size()) != 0 ||
        !memo_.has_room(n))
      return false;
    pos_ += opcodes.size();
    memo_.resize(memo_.size() + n);
    memo_used_ = memo_.size();
    return true;
  }
  // Reads the memo index if GET follows. Not an optional, here and in integer(), because those are returned in memory.
  bool get_index(std::uint32_t& index) {
    const std::size_t at = pos_;
    const unsigned char op = next();
    const std::size_t width = op == 'h' ? 1 : 4;
    if ((op == 'h' || op == 'j') && width <= size_ - pos_)
      if (const std::uint64_t i = take(width); i < memo_.size()) {
        index = static_cast<std::uint32_t>(i);
        return true;
      }
    pos_ = at;
    return false;
  }
  // Adds a value to the memo if PUT or MEMOIZE follows.
  bool remember(Handle h) {
    if (pos_ == size_) return false;
    const std::size_t at = pos_;
    const unsigned char op = next();
    const std::size_t width = op == 'q' ? 1 : op == 'r' ? 4 : 0;
    if (op != 0x94 && width == 0) {
      pos_ = at;
      return true;
    }
    if (width > size_ - pos_ || (width > 0 && take(width) != memo_.size()) || !memo_.has_room(1)) return false;
    if (h == kUnset)
      memo_.resize(memo_.size() + 1);
    else
      memo_.push(h);
    memo_used_ = memo_.size();
    return true;
  }

  // Pushes the object that stands for a run.
  bool begin_records(const RecordRow& record) {
    if (!allocate(3)) return false;
    std::uint32_t* cells = tree_.cells.data() + node_;
    cells[0] = header(Kind::kObject, 0);
    cells[1] = record.global;
    cells[kState] = kNone;
    const Handle run = handle(kNode, node_);
    if (!push(run)) return false;
    const auto below = [&](std::uint32_t n) -> std::optional<std::string_view> {
      if (n >= stack_.size()) return std::nullopt;
      return text_at(stack_[stack_.size() - 1 - n]);
    };
    return sink_->begin(number_of(record), run, below) || fail(kNotSimple);
  }

  std::optional<std::string_view> text_at(Handle h) const {
    if (tag_of(h) != kLeaf) return std::nullopt;
    const unsigned char* p = raw_ + payload_of(h);
    if (*p == 0x8c) return std::string_view(reinterpret_cast<const char*>(p + 2), p[1]);
    const LeafBytes text = leaf_bytes(tree_, h);
    if (text.kind != Kind::kString) return std::nullopt;
    return text_of(text);
  }

  // Returns whether an object of the class follows. If it does, moves to its EMPTY_TUPLE.
  bool record_follows(const RecordRow& record) {
    if (!ahead()) return false;
    const std::size_t at = pos_;
    if (std::uint32_t i = 0; get_index(i) && memo_[i] == record.global && record.global != kUnset) {
      const std::size_t begin = pos_;
      if (skip(')') && skip(0x81)) {
        pos_ = begin;
        return true;
      }
    }
    pos_ = at;
    return false;
  }

  bool take_record(RecordRow& record) {
    const std::uint32_t first = memo_.size();
    std::array<std::uint32_t, kMaxRecordFields> sizes{};
    for (RecordField& f : fields_) f.kind = RecordField::Kind::kAbsent;
    if (!follows(")\x81\x94}\x94(", 2) && !follows(")\x81}(", 0) &&
        (!skip(')') || !skip(0x81) || !remember(kUnset) || !skip('}') || !remember(kUnset) || !skip('(')))
      return fail(kNotSimple);
    for (std::size_t k = 0; !skip('u'); ++k) {
      const auto field = field_name(record, k);
      if (!field || fields_[*field].kind != RecordField::Kind::kAbsent) return fail(kNotSimple);
      if (!field_value(fields_[*field], sizes[*field], first)) return fail(kNotSimple);
    }
    // Bytes that were not read yet are zero, so check that all of it was read.
    if (!skip('b') || pos_ > tree_.text.filled() || !sink_->take(number_of(record), fields_)) return fail(kNotSimple);
    const std::size_t object = record.taken++;
    if (memo_.size() == first || record.what.value) return true;
    const std::uint32_t stride = memo_.size() - first;
    if (!record_memo_.empty()) {
      RecordMemo& last = record_memo_.back();
      if (last.cls == number_of(record) && last.stride == stride && last.sizes == sizes &&
          last.first + last.stride * last.count == first && last.first_object + last.count == object) {
        ++last.count;
        return true;
      }
    }
    if (sizes != std::array<std::uint32_t, kMaxRecordFields>{})
      record_memo_.push_back({first, stride, 1, number_of(record), object, sizes});
    return true;
  }

  // Reads a string that is pushed by GET or by its own opcode; returns kUnset for anything else.
  Handle string_handle() {
    if (std::uint32_t i = 0; get_index(i)) return text_at(memo_[i]) ? memo_[i] : kUnset;
    const std::size_t at = pos_;
    const unsigned char op = next();
    const std::size_t opcode = pos_ - 1;
    if (op == 'X' || op == 0x8c) {
      const std::size_t width = leaf_of(op).length_width;
      if (width <= size_ - pos_)
        if (const std::uint64_t n = take(width); n <= size_ - pos_) {
          pos_ += n;
          const auto kept = ahead() ? tree_.text.keep(opcode, pos_) : std::nullopt;
          if (!kept) return kUnset;
          const Handle h = handle(kLeaf, static_cast<std::uint32_t>(*kept));
          return remember(h) ? h : kUnset;
        }
    }
    pos_ = at;
    return kUnset;
  }

  // Reads a field's name and returns its number. `likely` is the number of fields before it.
  std::optional<std::size_t> field_name(RecordRow& record, std::size_t likely) {
    const std::size_t at = pos_;
    if (std::uint32_t i = 0; get_index(i)) {
      const Handle h = memo_[i];
      for (std::size_t k = likely; k < record.what.fields.size(); ++k)
        if (record.names[k] == h && h != kUnset) return k;
      pos_ = at;
    }
    const Handle name = string_handle();
    if (name == kUnset) return std::nullopt;
    for (std::size_t k = 0; k < record.what.fields.size(); ++k)
      if (record.names[k] == name) return k;
    for (std::size_t k = 0; k < record.what.fields.size(); ++k)
      if (record.what.fields[k] == text_at(name)) {
        record.names[k] = name;
        return k;
      }
    return std::nullopt;
  }

  bool integer(Index& value) {
    const std::size_t at = pos_;
    if (size_ - pos_ < 2) return false;
    if (raw_[at] == 'K') {
      pos_ += 2;
      value = raw_[at + 1];
      return true;
    }
    if (raw_[at] == 'h') return false;
    const unsigned char op = next();
    const std::size_t left = size_ - pos_;
    if (op == 'K' && left >= 1) {
      value = take(1);
      return true;
    }
    if (op == 'M' && left >= 2) {
      value = take(2);
      return true;
    }
    if (op == 'J' && left >= 4) {
      value = static_cast<std::int32_t>(take(4));
      return true;
    }
    if (op == 0x8a && left >= 1) {
      const std::size_t n = take(1);
      if (n <= left - 1) {
        pos_ += n;
        const auto number = decode_long(raw_ + pos_ - n, n);
        value = number.value_or(0);
        return number.has_value();
      }
    }
    pos_ = at;
    return false;
  }

  bool field_value(RecordField& field, std::uint32_t& size_at, std::uint32_t first_memo) {
    using FieldKind = RecordField::Kind;
    if (integer(field.number)) {
      field.kind = FieldKind::kInt;
      return true;
    }
    const std::size_t at = pos_;
    field.is_shared = false;
    if (std::uint32_t i = 0; get_index(i)) {
      const Handle h = memo_[i];
      if (h == torch_size_ && h != kUnset) return new_size(field, size_at, first_memo);
      if (const auto text = text_at(h)) {
        field.text = *text;
        field.identity = h;
        field.is_shared = true;
        field.kind = FieldKind::kText;
        return true;
      }
      if (const auto size = h == kUnset ? record_size(i) : size_at_node(h)) {
        field.size = *size;
        field.kind = FieldKind::kSize;
        return true;
      }
      pos_ = at;
    }
    if (skip('N')) {
      field.kind = FieldKind::kNone;
      return true;
    }
    if (skip(']')) {
      field.kind = FieldKind::kEmptyList;
      return remember(kUnset);
    }
    const Handle h = string_handle();
    if (h == kUnset) return false;
    field.text = *text_at(h);
    field.identity = h;
    field.kind = FieldKind::kText;
    return true;
  }

  // Reads the integers in a call of torch.Size, after the class.
  bool new_size(RecordField& field, std::uint32_t& size_at, std::uint32_t first_memo) {
    Dims& dims = field.size;
    dims = Dims();
    const bool is_marked = skip('(');
    for (Index n = 0; integer(n);) {
      if (dims.rank() == kMaxRank || n < 0) return false;
      dims.push_back(n);
    }
    if (is_marked ? !skip('t') || dims.rank() == 0
                  : dims.rank() > 3 || !skip(dims.rank() == 0 ? ')' : static_cast<unsigned char>(0x84 + dims.rank())))
      return false;
    if (dims.rank() > 0 && follows("\x94\x85\x94R\x94", 3)) {
      size_at = memo_.size() - first_memo;
    } else {
      if ((dims.rank() > 0 && !remember(kUnset)) || !skip(0x85) || !remember(kUnset) || !skip('R')) return false;
      const std::uint32_t at = memo_.size();
      if (!remember(kUnset)) return false;
      if (memo_.size() > at) size_at = 1 + at - first_memo;
    }
    field.kind = RecordField::Kind::kSize;
    return true;
  }

  std::optional<Dims> size_at_node(Handle h) const {
    if (h == kEmptyTuple) return Dims();
    if (!is_node(h, Kind::kTuple)) return std::nullopt;
    const std::uint32_t n = tree_.head(h) >> 4;
    if (n > static_cast<std::uint32_t>(kMaxRank)) return std::nullopt;
    Dims dims;
    for (std::uint32_t k = 0; k < n; ++k) {
      const Handle v = tree_.cell(payload_of(h) + 1 + k);
      const auto number = static_cast<std::int32_t>(v) >> 2;
      if (tag_of(v) != kSmallInt || number < 0) return std::nullopt;
      dims.push_back(number);
    }
    return dims;
  }

  RecordSink* sink_;
  std::vector<RecordRow> record_classes_;
  std::vector<RecordMemo> record_memo_;  // sorted by `first`
  std::size_t last_memo_ = 0;            // the entry that was found last
  RecordFields fields_;
};

}  // namespace
}  // namespace reshard::pickle::internal
