// SPDX-License-Identifier: Apache-2.0
// The stack machine, which follows the opcodes of a pickle and builds a Tree. Its state is in pickle_machine_state.h;
// pickle_machine_records.h reads the objects for a RecordSink.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "formats/encoding/pickle.h"
#include "formats/encoding/pickle_machine_records.h"
#include "formats/encoding/pickle_opcodes.h"
#include "formats/encoding/pickle_records.h"
#include "formats/encoding/pickle_tree.h"
#include "lib/base/cursor.h"
#include "lib/base/memory_limit.h"
#include "lib/base/text.h"

namespace reshard::pickle {
namespace internal {
namespace {

constexpr std::size_t kMaxGlobalName = 64 << 10;
constexpr std::size_t kMaxAttached = 1 << 20;

class Machine : RecordReader {
 public:
  // `sink` may be null; otherwise it takes the objects of its classes.
  Machine(Tree& tree, const Limits& limits, RecordSink* sink) : RecordReader(tree, limits, sink) {}

  Status run() {
    if (!reserve(!has_sink())) return io_error(tree_.path + ": pickle of " + bytes_of(size_) + ": out of memory");
    if (follow()) return {};
    TRY(std::move(file_));
    const unsigned char op = op_at_ < size_ ? raw_[op_at_] : 0;
    std::string name(opcode_name(op));
    if (op_at_ == size_) name = "end of the pickle";
    if (name.empty()) {
      char hex[24];
      std::snprintf(hex, sizeof hex, "opcode 0x%02x", op);
      name = hex;
    }
    std::string message = at(tree_.path, op_at_) + ": " + name + ": " + problem_;
    return unsupported_ ? unsupported(std::move(message)) : corrupt(std::move(message));
  }
  // Returns whether the pickle failed because it needed more cells than were reserved.
  bool lacks_cells() const { return lacks_cells_; }

 private:
  // Runs until STOP or a failure. The most frequent opcodes of a large .metadata are handled here, with position and
  // top of the stack in registers, in their usual forms; step() handles everything else.
  bool follow() {
    const unsigned char* const end = raw_ + size_;
    const unsigned char *p = raw_, *there = raw_ + tree_.text.filled();
    Handle* top = stack_.data();
    Handle* const stack_end = top + stack_.capacity();
    while (true) {
      bool is_done = false;
      if (there - p >= 3 && top != stack_end) {
        switch (p[0]) {
          case 'K':
            *top++ = small_int(p[1]);
            p += 2;
            continue;
          case 'M':
            *top++ = small_int(p[1] | p[2] << 8);
            p += 3;
            continue;
          case 'h':
            if (p[1] >= memo_.size() || memo_[p[1]] == kUnset) break;
            *top++ = memo_[p[1]];
            p += 2;
            continue;
          case ')':
            if (has_sink()) break;
            *top++ = kEmptyTuple;
            p += 1;
            continue;
          case 0x85:
          case 0x86: {
            const std::uint32_t n = p[0] - 0x84u;
            const std::uint32_t node = tree_.cells.size();
            if (top - stack_.data() < std::ptrdiff_t{floor_} + n || !tree_.cells.has_room(1 + n)) break;
            tree_.cells.resize(node + 1 + n);
            std::uint32_t* cells = tree_.cells.data() + node;
            top -= n;
            cells[0] = header(Kind::kTuple, n);
            cells[1] = top[0];
            if (n == 2) cells[2] = top[1];
            *top++ = handle(kNode, node);
            p += 1;
            is_done = true;
            break;
          }
          default:
            break;
        }
      }
      if (!is_done) {
        pos_ = p - raw_;
        stack_.resize(static_cast<std::uint32_t>(top - stack_.data()));
        if (!step()) return false;
        if (stopped_) return true;
        p = raw_ + pos_;
        there = raw_ + tree_.text.filled();
        top = stack_.data() + stack_.size();
      }
      // MEMOIZE follows nearly every opcode that makes a container.
      if (p != end && *p == 0x94 && memo_used_ == memo_.size() && memo_.has_room(1) &&
          top - stack_.data() > static_cast<std::ptrdiff_t>(floor_)) {
        memo_.push(top[-1]);
        ++memo_used_;
        p += 1;
      }
    }
  }

  bool step() {
    op_at_ = pos_;
    if (!ahead()) return false;
    if (pos_ == size_) return fail("expected STOP, got the end");
    const unsigned char op = raw_[pos_++];
    switch (op) {
      case 'K':
        return need(1) && push(small_int(raw_[pos_++]));
      case 'M':
        return need(2) && push(small_int(take(2)));
      case 'J':
        return binint();
      case 0x8a:
      case 0x8b:
        return long_int(op);
      case 'G':
      case 'X':
      case 0x8c:
      case 0x8d:
      case 'T':
      case 'U':
      case 'B':
      case 'C':
      case 0x8e:
      case 0x96:
        return leaf(op);
      case 'N':
        return push(kNone);
      case 0x88:
        return push(kTrue);
      case 0x89:
        return push(kFalse);

      case 0x94:
        return put(memo_used_);
      case 'q':
        return need(1) && put(static_cast<std::uint32_t>(take(1)));
      case 'r':
        return need(4) && put(static_cast<std::uint32_t>(take(4)));
      case 'p':
        return text_index() && put(line_index_);
      case 'h':
        return need(1) && get(static_cast<std::uint32_t>(take(1)));
      case 'j':
        return need(4) && get(static_cast<std::uint32_t>(take(4)));
      case 'g':
        return text_index() && get(line_index_);

      case ')':
        if (RecordRow* record = record_begun()) return take_records(*record);
        return push(kEmptyTuple);
      case 0x85:
        return tuple_of_last(1);
      case 0x86:
        return tuple_of_last(2);
      case 0x87:
        return tuple_of_last(3);
      case 't':
        return mark_needed() && tuple_of_last(above_mark()) && drop_mark();
      case ']':
        return push_container(Kind::kList);
      case '}':
        return push_container(Kind::kDict);
      case 0x8f:
        return push_container(Kind::kSet);
      case 'l':
        return container_from_mark(Kind::kList);
      case 'd':
        return container_from_mark(Kind::kDict);
      case 0x91:
        return container_from_mark(Kind::kSet);
      case 'a':
        return depth_needed(2) && add_last(Kind::kList, 1);
      case 's':
        return depth_needed(3) && add_last(Kind::kDict, 2);
      case 'e':
        return add_from_mark(Kind::kList);
      case 'u':
        return add_from_mark(Kind::kDict);
      case 0x90:
        return add_from_mark(Kind::kSet);

      case 'c':
        return global_of_lines();
      case 0x93:
        return global_of_stack();
      case 'R':
        return call(false);
      case 0x81:
        return call(false);
      case 0x92:
        return call(true);
      case 'b':
        return build();
      case 'Q':
        return persistent_id();

      case '(':
        return push_mark();
      case '0':
        if (!marks_.empty() && floor_ == stack_.size()) return drop_mark();
        if (!depth_needed(1)) return false;
        drop(1);
        return true;
      case '1':
        if (!mark_needed()) return false;
        stack_.resize(floor_);
        return drop_mark();
      case '2':
        return depth_needed(1) && push(stack_.back());

      case 0x80:
        if (!need(1)) return false;
        if (raw_[pos_] > 5) return refuse("expected a protocol up to 5, got " + std::to_string(raw_[pos_]));
        ++pos_;
        return true;
      case 0x95:
        return frame();
      case '.':
        return stop();
      default:
        return refuse("not an opcode of a supported pickle");
    }
  }

  bool binint() {
    if (!need(4)) return false;
    const Index v = static_cast<std::int32_t>(take(4));
    return push(is_small_int(v) ? small_int(v) : handle(kLeaf, static_cast<std::uint32_t>(op_at_)));
  }
  bool leaf(unsigned char op) {
    const Leaf form = leaf_of(op);
    std::uint64_t n = form.fixed;
    if (form.length_width > 0) {
      if (!need(form.length_width)) return false;
      n = take(form.length_width);
    }
    if (!need(n)) return false;
    pos_ += n;
    return push(handle(kLeaf, static_cast<std::uint32_t>(op_at_)));
  }
  bool long_int(unsigned char op) {
    if (!leaf(op) || !ahead()) return false;
    const LeafBytes b = leaf_bytes(tree_, stack_.back());
    const std::optional<Index> v = decode_long(b.data, b.size);
    if (v && is_small_int(*v)) stack_.back() = small_int(*v);
    return true;
  }

  bool put(std::uint32_t i) {
    if (!depth_needed(1)) return false;
    // Writers number memoized values from 0, each with an opcode of its own.
    if (i >= memo_.capacity() || i > op_at_)
      return fail("expected a memo index up to " +
                  std::to_string(std::min<Index>(static_cast<Index>(op_at_), memo_.capacity())) + ", got " +
                  std::to_string(i));
    if (i < memo_.size() && memo_[i] == kUnset && has_records()) return fail(kNotSimple);
    while (memo_.size() <= i) memo_.push(kUnset);
    if (memo_[i] == kUnset) ++memo_used_;
    memo_[i] = stack_.back();
    return true;
  }
  bool get(std::uint32_t i) {
    if (i >= memo_.size()) return fail_memo(i);
    if (memo_[i] == kUnset) {
      const auto size = record_size(i);
      return size ? push_size(*size) : fail_memo(i);
    }
    return push(memo_[i]);
  }

  // Reads a line of text into line_at_ and line_size_, without its end.
  bool line() {
    const void* end = std::memchr(raw_ + pos_, '\n', tree_.text.filled() - pos_);
    while (end == nullptr) {
      const std::size_t seen = tree_.text.filled();
      if (seen == size_) return fail("expected a line, got no end of one");
      if (!read_on(size_)) return false;
      end = std::memchr(raw_ + seen, '\n', tree_.text.filled() - seen);
    }
    line_at_ = pos_;
    line_size_ = static_cast<const unsigned char*>(end) - (raw_ + pos_);
    pos_ += line_size_ + 1;
    return true;
  }
  std::string_view line_text() const { return {reinterpret_cast<const char*>(raw_) + line_at_, line_size_}; }
  bool text_index() {
    if (!line()) return false;
    std::uint64_t v = 0;
    for (char c : line_text()) {
      if (c < '0' || c > '9' || v > UINT32_MAX / 10)
        return fail("expected a memo index, got '" + printable(line_text().substr(0, 40)) + "'");
      v = v * 10 + static_cast<std::uint64_t>(c - '0');
    }
    line_index_ = static_cast<std::uint32_t>(v);
    return line_size_ > 0 || fail("expected a memo index, got an empty line");
  }

  bool push_container(Kind kind) {
    if (!allocate(2)) return false;
    tree_.cells[node_] = header(kind, 0);
    tree_.cells[node_ + 1] = 0;
    return push(handle(kNode, node_));
  }

  // Appends the n topmost values of the stack to a container node and pops them.
  bool add_to(Handle node, std::uint32_t n) {
    const std::uint32_t at = payload_of(node);
    const Kind kind = tree_.node_kind(node);
    const std::uint32_t width = kind == Kind::kDict ? 2 : 1;
    if (n % width != 0) return fail("expected keys and values in turn, got " + std::to_string(n) + " of both");
    const std::uint64_t old_n = std::uint64_t{tree_.cells[at] >> 4} * width;
    const std::uint64_t new_n = old_n + n;
    if (new_n > kMaxCount) return fail("more than " + with_commas(kMaxCount) + " elements");
    const std::uint32_t old_count = static_cast<std::uint32_t>(old_n);
    if (room(static_cast<std::uint32_t>(new_n)) > room(old_count)) {
      if (!allocate(room(static_cast<std::uint32_t>(new_n)))) return false;
      std::uint32_t* cells = tree_.cells.data();
      if (old_count > 0) std::memcpy(cells + node_, cells + cells[at + 1], old_count * sizeof(Handle));
      cells[at + 1] = node_;
    }
    std::uint32_t* const target = tree_.cells.data() + tree_.cells[at + 1] + old_count;
    const Handle* const values = last(n);
    for (std::uint32_t i = 0; i < n; ++i) target[i] = values[i];  // usually two or three, so not worth a memcpy
    tree_.cells[at] = header(kind, static_cast<std::uint32_t>(new_n) / width);
    drop(n);
    return true;
  }

  bool container_from_mark(Kind kind) {
    if (!mark_needed()) return false;
    const std::uint32_t n = above_mark();
    if (!push_container(kind)) return false;
    const Handle node = pop();
    return add_to(node, n) && drop_mark() && push(node);
  }

  bool add_from_mark(Kind kind) {
    if (!mark_needed()) return false;
    const std::uint32_t n = above_mark();
    drop_mark();
    return depth_needed(n + 1) && add_last(kind, n);
  }

  // Adds the n topmost values to the value below them: a container of that kind, or an object.
  bool add_last(Kind kind, std::uint32_t n) {
    const Handle target = *last(n + 1);
    if (tag_of(target) == kNode) {
      if (tree_.node_kind(target) == kind) return add_to(target, n);
      if (tree_.node_kind(target) == Kind::kObject) {
        RareProperties* extra = attached(target);
        if (extra == nullptr) return false;
        if (extra->items == kNone) {
          if (!push_container(kind)) return false;
          extra->items = pop();
        }
        if (tree_.node_kind(extra->items) == kind) return add_to(extra->items, n);
      }
    }
    return fail("expected " + std::string(kind_name(kind)) + " to add to, got another value");
  }

  RareProperties* attached(Handle h) {
    if (tree_.attached.size() >= kMaxAttached && !tree_.attached.count(h)) {
      fail("more than " + with_commas(Index{kMaxAttached}) + " containers with a state or objects with items");
      return nullptr;
    }
    return &tree_.attached[h];
  }

  bool push_global(std::string_view module, std::string_view name) {
    if (module.size() + name.size() > kMaxGlobalName)
      return fail("expected a name of at most " + with_commas(kMaxGlobalName) + " bytes, got " +
                  with_commas(module.size() + name.size()));
    std::string key;
    key.reserve(module.size() + name.size() + 1);
    key.append(module).append(1, '\n').append(name);
    const auto [it, is_new] =
        global_index_.try_emplace(std::move(key), static_cast<std::uint32_t>(tree_.globals.size()));
    const Handle h = handle(kConstant, kFirstGlobal + it->second);
    if (is_new) {
      if (std::ssize(tree_.globals) >= limits_.globals)
        return fail("more than " + with_commas(limits_.globals) + " different globals");
      tree_.globals.push_back({std::string(module), std::string(name)});
      note_global(module, name, h);
      if (module == "torch" && name == "Size") torch_size_ = h;
      if (module == "collections" && name == "OrderedDict") ordered_dict_ = h;
    }
    return push(h);
  }
  bool global_of_lines() {
    if (!line()) return false;
    const std::string_view module = line_text();
    return line() && push_global(module, line_text());
  }
  bool global_of_stack() {
    if (!depth_needed(2)) return false;
    const Handle name = pop();
    const Handle module = pop();
    if (tag_of(name) != kLeaf || tag_of(module) != kLeaf) return fail("expected two strings on the stack");
    const LeafBytes n = leaf_bytes(tree_, name), m = leaf_bytes(tree_, module);
    if (n.kind != Kind::kString || m.kind != Kind::kString) return fail("expected two strings on the stack");
    return push_global(text_of(m), text_of(n));
  }

  bool is_tuple(Handle h) const { return h == kEmptyTuple || is_node(h, Kind::kTuple); }
  bool is_global(Handle h) const { return tag_of(h) == kConstant && payload_of(h) >= kFirstGlobal; }

  std::uint32_t count_of(Handle container) const { return tree_.cells[payload_of(container)] >> 4; }
  // Returns where the elements of a tuple or a list begin.
  std::uint32_t elements_at(Handle h) const {
    const std::uint32_t at = payload_of(h);
    return tree_.node_kind(h) == Kind::kTuple ? at + 1 : tree_.cells[at + 1];
  }
  bool is_pair(Handle h) const { return (is_node(h, Kind::kTuple) || is_node(h, Kind::kList)) && count_of(h) == 2; }

  // Returns the list of OrderedDict([[key, value], ...]), as Python 2 pickles it; kUnset if the arguments are others.
  Handle list_of(Handle args) const {
    if (!is_node(args, Kind::kTuple) || count_of(args) != 1) return kUnset;
    const Handle list = tree_.cells[elements_at(args)];
    return is_node(list, Kind::kList) ? list : kUnset;
  }

  // Pushes the dict. The list becomes it, so that many calls with one list cost nothing.
  bool push_dict_of_pairs(Handle list) {
    const std::uint32_t n = count_of(list);
    if (n > kMaxCount / 2) return fail("more than " + with_commas(kMaxCount) + " elements");
    if (!allocate(room(2 * n))) return false;
    std::uint32_t* const cells = tree_.cells.data();
    const std::uint32_t pairs = elements_at(list);
    for (std::uint32_t i = 0; i < n; ++i) {
      if (!is_pair(cells[pairs + i])) return fail("expected pairs of keys and values in an OrderedDict");
      const std::uint32_t pair = elements_at(cells[pairs + i]);
      cells[node_ + 2 * i] = cells[pair];
      cells[node_ + 2 * i + 1] = cells[pair + 1];
    }
    cells[payload_of(list)] = header(Kind::kDict, n);
    cells[payload_of(list) + 1] = node_;
    return push(list);
  }

  bool call(bool with_keywords) {
    if (!depth_needed(with_keywords ? 3 : 2)) return false;
    const Handle keywords = with_keywords ? pop() : kNone;
    Handle args = pop();
    const Handle callee = pop();
    if (!is_global(callee) && !is_node(callee, Kind::kObject)) return fail("expected a class or function to call");
    if (!is_tuple(args)) return fail("expected a tuple of arguments");
    if (callee == torch_size_ && is_node(args, Kind::kTuple)) {
      const Handle first = tree_.cells[payload_of(args) + 1];
      if (tree_.head(args) == header(Kind::kTuple, 1) && is_tuple(first)) return push(first);
    }
    if (callee == ordered_dict_ && args == kEmptyTuple) return push_container(Kind::kDict);
    if (const Handle list = list_of(args); callee == ordered_dict_ && list != kUnset) return push_dict_of_pairs(list);
    const std::uint32_t count = args == kEmptyTuple ? 0 : 1;
    if (!allocate(3 + count)) return false;
    const Handle object = handle(kNode, node_);
    std::uint32_t* cells = tree_.cells.data() + node_;
    cells[0] = header(Kind::kObject, count);
    cells[1] = callee;
    cells[kState] = kNone;
    if (count > 0) cells[kArgs] = args;
    if (keywords != kNone) {
      if (!is_node(keywords, Kind::kDict)) return fail("expected a dict of keyword arguments");
      RareProperties* extra = attached(object);
      if (extra == nullptr) return false;
      extra->keywords = keywords;
    }
    return push(object);
  }

  bool build() {
    if (!depth_needed(2)) return false;
    const Handle state = pop();
    const Handle target = stack_.back();
    if (tag_of(target) != kNode) return fail("expected an object to give a state to");
    Handle* slot = nullptr;
    if (tree_.node_kind(target) == Kind::kObject) {
      slot = &tree_.cells[payload_of(target) + kState];
    } else if (RareProperties* extra = attached(target)) {
      slot = &extra->state;
    } else {
      return false;
    }
    if (*slot != kNone) return fail("expected an object without a state, got one that already has a state");
    *slot = state;
    return true;
  }

  bool persistent_id() {
    if (!depth_needed(1) || !allocate(2)) return false;
    tree_.cells[node_] = header(Kind::kPersistentId, 0);
    tree_.cells[node_ + 1] = stack_.back();
    stack_.back() = handle(kNode, node_);
    return true;
  }

  bool stop() {
    if (!marks_.empty() || stack_.size() != 1)
      return fail("expected one value on the stack, got " + std::to_string(stack_.size()));
    if (pos_ != size_) return fail("expected the end, got " + std::to_string(size_ - pos_) + " more bytes");
    tree_.root = stack_.back();
    stopped_ = true;
    return true;
  }

  bool stopped_ = false;
  std::unordered_map<std::string, std::uint32_t> global_index_;  // "module\nname"
  Handle ordered_dict_ = kUnset;

  // Results of parts of a step.
  std::size_t line_at_ = 0;
  std::size_t line_size_ = 0;
  std::uint32_t line_index_ = 0;
};

}  // namespace
}  // namespace internal

namespace {

// Pickles of this length may need megabytes for the tree.
constexpr Index kLongPickle = kMuchMemory / 16;

Result<Document> read_pickle(internal::Text text, std::string_view path, const Limits& limits, RecordSink* sink) {
  const auto size = std::ssize(text);
  if (size > std::min(limits.bytes, Limits{}.bytes))
    return unsupported(std::string(path) + ": pickle: expected at most " +
                       count_of(std::min(limits.bytes, Limits{}.bytes), "byte") + ", got " + with_commas(size));
  auto tree = std::make_unique<internal::Tree>();
  tree->text = std::move(text);
  tree->path = path;
  Limits capped = limits;
  capped.cells = std::min(limits.cells, (Index{1} << 30) - 1);
  capped.memo = std::min(limits.memo, Limits{}.bytes);
  capped.globals = std::min(limits.globals, Index{1} << 24);
  const Index most_cells = capped.cells;
  // A sink leaves few cells.
  const bool is_asked = !sink && size >= kLongPickle;
  if (const auto left = is_asked ? memory_left() : std::nullopt)
    capped.cells = std::min(most_cells, *left / Index{sizeof(std::uint32_t)});
  internal::Machine machine(*tree, capped, sink);
  Status read = machine.run();
  if (!read && machine.lacks_cells() && capped.cells < most_cells)
    return too_little_memory(tree->path + ": a pickle of " + human_bytes(size), kMuchMemory);
  TRY(std::move(read));
  return Document(std::move(tree));
}

}  // namespace

Result<Document> parse(std::string bytes, std::string_view path, const Limits& limits) {
  return read_pickle(internal::Text(std::move(bytes)), path, limits, nullptr);
}

Result<Document> parse_records(const File& file, RecordSink& sink) {
  return read_pickle(TRY(internal::Text::of(file)), file.path(), {}, &sink);
}

}  // namespace reshard::pickle
