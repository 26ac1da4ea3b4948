// The stack machine: follows the opcodes of a pickle and leaves a Tree.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "formats/encoding/pickle.h"
#include "formats/encoding/pickle_opcodes.h"
#include "formats/encoding/pickle_records.h"
#include "formats/encoding/pickle_tree.h"
#include "lib/base/cursor.h"
#include "lib/base/resident.h"
#include "lib/base/text.h"

namespace reshard::pickle {
namespace internal {
namespace {

constexpr std::size_t kMaxGlobalName = 64 << 10;
constexpr std::size_t kMaxAttached = 1 << 20;
constexpr std::size_t kAhead = 64 << 10;         // bytes that a step may look at
constexpr std::size_t kReleasedBytes = 1 << 20;  // of records, at once
constexpr const char* kNotSimple = "expected an object as simple as the others of its class";

// The stack machine. Steps return false once something is wrong, and `problem_` says what.
class Machine {
 public:
  // `sink`: null, or what takes the objects of its classes.
  Machine(Tree& tree, const Limits& limits, RecordSink* sink)
      : tree_(tree), limits_(limits), raw_(tree.raw()), size_(tree.text.size()), sink_(sink) {
    if (sink == nullptr) return;
    for (const RecordClass& c : sink->classes()) record_classes_.push_back({c, kUnset, {}, 0});
  }

  Status run() {
    if (!reserve()) return io_error(tree_.path + ": pickle of " + std::to_string(size_) + " bytes: out of memory");
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
    std::string message = at(tree_.path, static_cast<Index>(op_at_)) + ": " + name + ": " + problem_;
    return unsupported_ ? unsupported(std::move(message)) : corrupt(std::move(message));
  }
  // Whether it ended as it had not as many as it needed.
  bool lacks_cells() const { return lacks_cells_; }

 private:
  [[gnu::cold, gnu::noinline]] bool fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  [[gnu::cold, gnu::noinline]] bool refuse(std::string problem) {
    unsupported_ = true;
    return fail(std::move(problem));
  }
  [[gnu::cold, gnu::noinline]] bool fail_short(std::uint64_t wanted) {
    return fail("expected " + std::to_string(wanted) + " bytes, got " + std::to_string(size_ - pos_) + " to the end");
  }

  [[gnu::cold, gnu::noinline]] bool fail_depth(std::uint32_t n) {
    return fail("expected " + std::to_string(n) + " values on the stack, got " +
                std::to_string(stack_.size() - floor_));
  }
  [[gnu::cold, gnu::noinline]] bool fail_stack() {
    return fail("more than " + with_commas(limits_.stack) + " values on the stack");
  }
  [[gnu::cold, gnu::noinline]] bool fail_cells() {
    lacks_cells_ = true;
    return fail("more than " + with_commas(tree_.cells.capacity() - 1) + " cells");
  }
  [[gnu::cold, gnu::noinline]] bool fail_memo(std::uint32_t i) {
    return fail("expected a memo index that was put, got " + std::to_string(i));
  }

  // Every opcode pushes and remembers one value at most. None takes more than 3 cells for each of its bytes: the worst
  // is a list that is appended to one by one, just after it outgrew eight elements.
  bool reserve() {
    const Index n = static_cast<Index>(size_);
    const bool is_dense = sink_ == nullptr;
    if (!stack_.reserve(std::min(limits_.stack, n), is_dense) ||
        !marks_.reserve(std::min(limits_.stack, n), is_dense) || !memo_.reserve(std::min(limits_.memo, n), is_dense) ||
        !tree_.cells.reserve(1 + std::min(limits_.cells, 3 * n + 16), is_dense))
      return false;
    tree_.cells.push(0);  // kUnset is no node
    return true;
  }

  // Takes steps until STOP or a failure. The opcodes that are most of a large .metadata are done here, with position
  // and top of the stack in registers, as long as nothing is unusual about them; what is unusual is left to step().
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
            if (sink_ != nullptr) break;
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
        pos_ = static_cast<std::size_t>(p - raw_);
        stack_.resize(static_cast<std::uint32_t>(top - stack_.data()));
        if (!step()) return false;
        if (stopped_) return true;
        p = raw_ + pos_;
        there = raw_ + tree_.text.filled();
        top = stack_.data() + stack_.size();
      }
      // MEMOIZE follows nearly everything that makes a container.
      if (p != end && *p == 0x94 && memo_used_ == memo_.size() && memo_.has_room(1) &&
          top - stack_.data() > static_cast<std::ptrdiff_t>(floor_)) {
        memo_.push(top[-1]);
        ++memo_used_;
        p += 1;
      }
    }
  }

  // Whether the bytes that a step looks at are there.
  [[gnu::always_inline]] bool ahead() {
    return pos_ + kAhead <= tree_.text.filled() || tree_.text.filled() == size_ || read_on(pos_ + kAhead);
  }
  [[gnu::cold, gnu::noinline]] bool read_on(std::size_t end) {
    if (file_) file_ = tree_.text.fill(end);
    return file_.has_value();
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
        return need(2) && push(small_int(static_cast<Index>(take(2))));
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
        return refuse("not an opcode of the data pickles that are read here");
    }
  }

  bool need(std::uint64_t n) { return n <= size_ - pos_ || fail_short(n); }
  std::uint64_t take(std::size_t n) {
    const std::uint64_t v = little_endian(raw_ + pos_, n);
    pos_ += n;
    return v;
  }

  [[gnu::always_inline]] bool push(Handle h) {
    if (!stack_.has_room(1)) return fail_stack();
    stack_.push(h);
    return true;
  }
  // Values below the last mark belong to an unfinished container and are out of reach.
  [[gnu::always_inline]] bool depth_needed(std::uint32_t n) { return stack_.size() - floor_ >= n || fail_depth(n); }
  Handle pop() {
    const Handle h = stack_.back();
    drop(1);
    return h;
  }
  void drop(std::uint32_t n) { stack_.resize(stack_.size() - n); }
  Handle* last(std::uint32_t n) { return stack_.data() + (stack_.size() - n); }
  bool mark_needed() { return !marks_.empty() || fail("expected a mark on the stack, got none"); }
  bool push_mark() {
    if (!marks_.has_room(1)) return fail("more than " + with_commas(limits_.stack) + " marks");
    floor_ = stack_.size();
    marks_.push(floor_);
    return true;
  }
  bool drop_mark() {
    marks_.resize(marks_.size() - 1);
    floor_ = marks_.empty() ? 0 : marks_.back();
    return true;
  }
  std::uint32_t above_mark() const { return stack_.size() - floor_; }

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
    // Writers number what they remember from 0 on, each with an opcode of its own.
    if (i >= memo_.capacity() || i > op_at_)
      return fail("expected a memo index up to " +
                  std::to_string(std::min<Index>(static_cast<Index>(op_at_), memo_.capacity())) + ", got " +
                  std::to_string(i));
    if (i < memo_.size() && memo_[i] == kUnset && !record_memo_.empty()) return fail(kNotSimple);
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

  // A line of text, without its end, into line_at_ and line_size_.
  bool line() {
    const void* end = std::memchr(raw_ + pos_, '\n', tree_.text.filled() - pos_);
    while (end == nullptr) {
      const std::size_t seen = tree_.text.filled();
      if (seen == size_) return fail("expected a line, got no end of one");
      if (!read_on(size_)) return false;
      end = std::memchr(raw_ + seen, '\n', tree_.text.filled() - seen);
    }
    line_at_ = pos_;
    line_size_ = static_cast<std::size_t>(static_cast<const unsigned char*>(end) - (raw_ + pos_));
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

  // n cells at the end of the tree, at index node_.
  [[gnu::always_inline]] bool allocate(std::uint32_t n) {
    node_ = tree_.cells.size();
    if (!tree_.cells.has_room(n)) return fail_cells();
    tree_.cells.resize(node_ + n);
    return true;
  }

  bool tuple_of_last(std::uint32_t n) {
    if (!depth_needed(n)) return false;
    if (n == 0) return push(kEmptyTuple);
    if (!allocate(1 + n)) return false;
    std::uint32_t* cells = tree_.cells.data() + node_;
    cells[0] = header(Kind::kTuple, n);
    std::memcpy(cells + 1, last(n), n * sizeof(Handle));
    drop(n);
    return push(handle(kNode, node_));
  }

  bool push_container(Kind kind) {
    if (!allocate(2)) return false;
    tree_.cells[node_] = header(kind, 0);
    tree_.cells[node_ + 1] = 0;
    return push(handle(kNode, node_));
  }

  // Appends the n values on top of the stack to a container node, and pops them.
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
    for (std::uint32_t i = 0; i < n; ++i) target[i] = values[i];  // most often two or three: no call of memcpy
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

  // Adds the n values on top of the stack to what lies below them: a container of that kind, or an object.
  bool add_last(Kind kind, std::uint32_t n) {
    const Handle target = *last(n + 1);
    if (tag_of(target) == kNode) {
      if (tree_.node_kind(target) == kind) return add_to(target, n);
      if (tree_.node_kind(target) == Kind::kObject) {
        Attached* extra = attached(target);
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

  Attached* attached(Handle h) {
    if (tree_.attached.size() >= kMaxAttached && !tree_.attached.count(h)) {
      fail("more than " + with_commas(static_cast<Index>(kMaxAttached)) +
           " containers with a state or objects with items");
      return nullptr;
    }
    return &tree_.attached[h];
  }

  bool push_global(std::string_view module, std::string_view name) {
    if (module.size() + name.size() > kMaxGlobalName)
      return fail("expected a name of at most " + with_commas(kMaxGlobalName) + " bytes, got " +
                  with_commas(static_cast<Index>(module.size() + name.size())));
    std::string key;
    key.reserve(module.size() + name.size() + 1);
    key.append(module).append(1, '\n').append(name);
    const auto [it, is_new] =
        global_index_.try_emplace(std::move(key), static_cast<std::uint32_t>(tree_.globals.size()));
    const Handle h = handle(kConstant, kFirstGlobal + it->second);
    if (is_new) {
      if (static_cast<Index>(tree_.globals.size()) >= limits_.globals)
        return fail("more than " + with_commas(limits_.globals) + " different globals");
      tree_.globals.push_back({std::string(module), std::string(name)});
      for (RecordRow& c : record_classes_)
        if (c.what.module == module && c.what.name == name) c.global = h;
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

  bool is_node(Handle h, Kind kind) const { return tag_of(h) == kNode && tree_.node_kind(h) == kind; }
  bool is_tuple(Handle h) const { return h == kEmptyTuple || is_node(h, Kind::kTuple); }
  bool is_global(Handle h) const { return tag_of(h) == kConstant && payload_of(h) >= kFirstGlobal; }

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
      Attached* extra = attached(object);
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
    } else if (Attached* extra = attached(target)) {
      slot = &extra->state;
    } else {
      return false;
    }
    if (*slot != kNone) return fail("expected an object without a state, got one that has it already");
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

  // Frames are hints for reading ahead: their content follows as if they were not there.
  bool frame() {
    if (!need(8)) return false;
    return need(take(8));
  }

  bool stop() {
    if (!marks_.empty() || stack_.size() != 1)
      return fail("expected one value on the stack, got " + std::to_string(stack_.size()));
    if (pos_ != size_) return fail("expected the end, got " + std::to_string(size_ - pos_) + " more bytes");
    tree_.root = stack_.back();
    stopped_ = true;
    return true;
  }

  // ---- Records

  struct RecordRow {
    RecordClass what;
    Handle global = kUnset;
    std::array<Handle, kMaxRecordFields> names{};  // of its fields, once they were seen
    std::size_t taken = 0;                         // objects
  };
  // Objects that follow each other, and as many remembered values of each: which of those are sizes is all that is
  // remembered.
  struct RecordMemo {
    std::uint32_t first = 0;
    std::uint32_t stride = 0;
    std::uint32_t count = 0;
    std::size_t cls = 0;
    std::size_t first_object = 0;
    std::array<std::uint32_t, kMaxRecordFields> sizes{};  // 1 + place of the field's among an object's; 0: none

    bool has(std::uint32_t i) const { return i >= first && i - first < std::uint64_t{stride} * count; }
  };

  std::size_t number_of(const RecordRow& record) const {
    return static_cast<std::size_t>(&record - record_classes_.data());
  }

  // After EMPTY_TUPLE: the class on top of the stack, where an object of it is being made.
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

  // The next opcode, beyond the beginnings of frames; 0 at the end.
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
  // Steps over these opcodes if they follow, `n` of which remember values.
  bool follows(std::string_view opcodes, std::uint32_t n) {
    if (size_ - pos_ < opcodes.size() || std::memcmp(raw_ + pos_, opcodes.data(), opcodes.size()) != 0 ||
        !memo_.has_room(n))
      return false;
    pos_ += opcodes.size();
    memo_.resize(memo_.size() + n);
    memo_used_ = memo_.size();
    return true;
  }
  // An index in the memo, where GET follows. No optional, here and in integer(): one goes through memory.
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
  // Remembers a value in the next free place, where that is asked for.
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

  // Objects of one class, or keys and values in turn, as far as they follow each other.
  bool take_records(RecordRow& first) {
    pos_ = op_at_;
    if (memo_used_ != memo_.size()) return fail(kNotSimple);
    stack_.resize(stack_.size() - 1);
    RecordRow* last = &first;
    if (!begin_records(first) || !take_record(first)) return false;
    const std::size_t second = pos_;  // the first may bring the fields' names
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

  // A run's stand-in, on the stack.
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

  // Whether an object of the class follows; at its EMPTY_TUPLE then.
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
    // What is not there yet reads as zeros.
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

  // A string that GET or its own opcode pushes; kUnset of anything else.
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

  // The number of the field whose name follows; `likely`: how many there were before it.
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
      value = static_cast<Index>(take(1));
      return true;
    }
    if (op == 'M' && left >= 2) {
      value = static_cast<Index>(take(2));
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

  // The integers that torch.Size is called with, after the class.
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

  // The torch.Size of an object that was taken, by its index in the memo.
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

  Tree& tree_;
  const Limits& limits_;
  const unsigned char* raw_;
  std::size_t size_;
  RecordSink* sink_;
  std::size_t pos_ = 0;
  std::size_t op_at_ = 0;
  bool stopped_ = false;
  bool unsupported_ = false;
  bool lacks_cells_ = false;
  std::string problem_;
  Status file_;  // what reading on said

  Cells stack_;
  Cells marks_;              // heights of the stack
  std::uint32_t floor_ = 0;  // the last of them, or 0
  Cells memo_;
  std::uint32_t memo_used_ = 0;
  std::unordered_map<std::string, std::uint32_t> global_index_;  // "module\nname"
  Handle torch_size_ = kUnset;
  Handle ordered_dict_ = kUnset;

  std::vector<RecordRow> record_classes_;
  std::vector<RecordMemo> record_memo_;  // ascending
  std::size_t last_memo_ = 0;            // the one that was asked last
  RecordFields fields_;

  // Results of the steps' parts.
  std::uint32_t node_ = 0;
  std::size_t line_at_ = 0;
  std::size_t line_size_ = 0;
  std::uint32_t line_index_ = 0;
};

}  // namespace
}  // namespace internal

namespace {

// Of one as long the tree may take megabytes.
constexpr Index kLongPickle = kMuchMemory / 16;

Result<Document> read_pickle(internal::Text text, std::string_view path, const Limits& limits, RecordSink* sink) {
  const auto size = static_cast<Index>(text.size());
  if (size > std::min(limits.bytes, Limits{}.bytes))
    return unsupported(std::string(path) + ": pickle: expected at most " +
                       with_commas(std::min(limits.bytes, Limits{}.bytes)) + " bytes, got " + with_commas(size));
  auto tree = std::make_unique<internal::Tree>();
  tree->text = std::move(text);
  tree->path = path;
  Limits capped = limits;
  capped.cells = std::min(limits.cells, (Index{1} << 30) - 1);
  capped.memo = std::min(limits.memo, Limits{}.bytes);
  capped.globals = std::min(limits.globals, Index{1} << 24);
  const Index most_cells = capped.cells;
  // Of what a sink takes few cells stay.
  const bool is_asked = !sink && size >= kLongPickle;
  if (const auto left = is_asked ? memory_left() : std::nullopt)
    capped.cells = std::min(most_cells, *left / static_cast<Index>(sizeof(std::uint32_t)));
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
