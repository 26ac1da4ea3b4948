#include "formats/encoding/pickle.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "lib/base/cursor.h"
#include "lib/base/text.h"

namespace reshard::pickle {
namespace {

// A value in 32 bits. The low two say what the other thirty are.
using Handle = std::uint32_t;
enum Tag : std::uint32_t {
  kNode = 0,      // index of a cell: a container or an object
  kSmallInt = 1,  // the number, signed
  kLeaf = 2,      // position in the pickle of the opcode that pushed a string or a number
  kConstant = 3,  // one of the below, or a global
};
constexpr Handle handle(Tag tag, std::uint32_t payload) { return payload << 2 | tag; }
constexpr Tag tag_of(Handle h) { return static_cast<Tag>(h & 3); }
constexpr std::uint32_t payload_of(Handle h) { return h >> 2; }

constexpr Handle kNone = handle(kConstant, 0);
constexpr Handle kTrue = handle(kConstant, 1);
constexpr Handle kFalse = handle(kConstant, 2);
constexpr Handle kEmptyTuple = handle(kConstant, 3);
constexpr std::uint32_t kFirstGlobal = 4;  // payloads from here on are 4 + index of a global
constexpr Handle kUnset = 0xFFFFFFFF;      // no value

constexpr Index kSmallIntEnd = Index{1} << 29;
constexpr bool is_small_int(Index v) { return v >= -kSmallIntEnd && v < kSmallIntEnd; }
constexpr Handle small_int(Index v) { return handle(kSmallInt, static_cast<std::uint32_t>(v)); }

// Nodes begin with a cell whose low four bits are the kind and the others a count.
//   Tuple            count, elements...
//   List, Set, Dict  count, index of the cells with the elements (keys and values in turn)
//   Object           count of argument cells (0 or 1), callee, state, [args, unless they are ()]
//   PersistentId     0, id
constexpr std::uint32_t header(Kind kind, std::uint32_t count) { return count << 4 | static_cast<std::uint32_t>(kind); }
constexpr std::uint32_t kMaxCount = (1u << 28) - 1;
constexpr std::uint32_t kState = 2, kArgs = 3;  // cells of an Object

constexpr std::size_t kMaxGlobalName = 64 << 10;
constexpr std::size_t kMaxAttached = 1 << 20;
constexpr std::size_t kMaxPrintedChars = 4000;

// Room that a growing container of n cells has; a function of n, so that it need not be stored.
constexpr std::uint32_t room(std::uint32_t n) { return n <= 8 ? n : std::bit_ceil(n); }

// An array of cells that is given its full room at once: reading n bytes cannot need more than a small multiple of n.
// Room that is not used takes addresses, but no memory, and nothing is ever copied to grow.
class Cells {
 public:
  Cells() = default;
  Cells(const Cells&) = delete;
  Cells& operator=(const Cells&) = delete;
  ~Cells() {
    if (is_mapped_) {
      munmap(data_, bytes());
    } else {
      std::free(data_);
    }
  }

  // False when there is no room to be had.
  bool reserve(Index capacity) {
    capacity_ = static_cast<std::uint32_t>(capacity);
    if (bytes() < kMappedBytes) {
      data_ = static_cast<std::uint32_t*>(std::malloc(std::max<std::size_t>(bytes(), 1)));
      return data_ != nullptr;
    }
    void* p = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return false;
    madvise(p, bytes(), MADV_HUGEPAGE);  // a page fault every 4 KiB would cost as much as the reading
    data_ = static_cast<std::uint32_t*>(p);
    is_mapped_ = true;
    return true;
  }

  std::uint32_t size() const { return size_; }
  std::uint32_t capacity() const { return capacity_; }
  std::uint32_t* data() { return data_; }
  const std::uint32_t* data() const { return data_; }
  std::uint32_t& operator[](std::uint32_t i) { return data_[i]; }
  std::uint32_t operator[](std::uint32_t i) const { return data_[i]; }
  std::uint32_t back() const { return data_[size_ - 1]; }
  std::uint32_t& back() { return data_[size_ - 1]; }
  bool empty() const { return size_ == 0; }

  bool has_room(std::uint32_t n) const { return n <= capacity_ - size_; }
  // Sets the size, up to the capacity; new cells are not initialised.
  void resize(std::uint32_t n) { size_ = n; }
  // There must be room.
  void push(std::uint32_t v) { data_[size_++] = v; }

 private:
  static constexpr std::size_t kMappedBytes = 1 << 20;
  std::size_t bytes() const { return std::size_t{capacity_} * sizeof(std::uint32_t); }

  std::uint32_t* data_ = nullptr;
  std::uint32_t size_ = 0;
  std::uint32_t capacity_ = 0;
  bool is_mapped_ = false;
};

std::string_view opcode_name(unsigned char op) {
  switch (op) {
    case 0x80:
      return "PROTO";
    case 0x95:
      return "FRAME";
    case '.':
      return "STOP";
    case '(':
      return "MARK";
    case '0':
      return "POP";
    case '1':
      return "POP_MARK";
    case '2':
      return "DUP";
    case 'N':
      return "NONE";
    case 0x88:
      return "NEWTRUE";
    case 0x89:
      return "NEWFALSE";
    case 'K':
      return "BININT1";
    case 'M':
      return "BININT2";
    case 'J':
      return "BININT";
    case 0x8a:
      return "LONG1";
    case 0x8b:
      return "LONG4";
    case 'G':
      return "BINFLOAT";
    case 'X':
      return "BINUNICODE";
    case 0x8c:
      return "SHORT_BINUNICODE";
    case 0x8d:
      return "BINUNICODE8";
    case 'T':
      return "BINSTRING";
    case 'U':
      return "SHORT_BINSTRING";
    case 'B':
      return "BINBYTES";
    case 'C':
      return "SHORT_BINBYTES";
    case 0x8e:
      return "BINBYTES8";
    case 0x96:
      return "BYTEARRAY8";
    case ')':
      return "EMPTY_TUPLE";
    case 0x85:
      return "TUPLE1";
    case 0x86:
      return "TUPLE2";
    case 0x87:
      return "TUPLE3";
    case 't':
      return "TUPLE";
    case ']':
      return "EMPTY_LIST";
    case 'a':
      return "APPEND";
    case 'e':
      return "APPENDS";
    case 'l':
      return "LIST";
    case '}':
      return "EMPTY_DICT";
    case 's':
      return "SETITEM";
    case 'u':
      return "SETITEMS";
    case 'd':
      return "DICT";
    case 0x8f:
      return "EMPTY_SET";
    case 0x90:
      return "ADDITEMS";
    case 0x91:
      return "FROZENSET";
    case 'c':
      return "GLOBAL";
    case 0x93:
      return "STACK_GLOBAL";
    case 'R':
      return "REDUCE";
    case 0x81:
      return "NEWOBJ";
    case 0x92:
      return "NEWOBJ_EX";
    case 'b':
      return "BUILD";
    case 'Q':
      return "BINPERSID";
    case 'q':
      return "BINPUT";
    case 'r':
      return "LONG_BINPUT";
    case 'p':
      return "PUT";
    case 0x94:
      return "MEMOIZE";
    case 'h':
      return "BINGET";
    case 'j':
      return "LONG_BINGET";
    case 'g':
      return "GET";
    default:
      return "";
  }
}

std::uint64_t little_endian(const unsigned char* p, std::size_t n) {
  std::uint64_t v = 0;
  std::memcpy(&v, p, n);
  return v;
}

// The two's complement number in n little-endian bytes, where it fits.
std::optional<Index> decode_long(const unsigned char* p, std::size_t n) {
  if (n == 0) return 0;
  const unsigned char sign = p[n - 1] & 0x80 ? 0xff : 0;
  while (n > 8 && p[n - 1] == sign) --n;
  if (n > 8) return std::nullopt;
  std::uint64_t v = little_endian(p, n);
  if (n < 8 && sign != 0) v |= ~std::uint64_t{0} << (8 * n);
  const Index out = static_cast<Index>(v);
  // Eight bytes left of a longer number: their own sign must be that of the whole.
  if (n == 8 && (out < 0) != (sign != 0)) return std::nullopt;
  return out;
}

}  // namespace

namespace internal {

// What a leaf's opcode is followed by.
struct Leaf {
  Kind kind;
  std::size_t length_width;  // bytes that say how many payload bytes follow; 0: `fixed` bytes follow
  std::size_t fixed;
};

struct Attached {
  Handle items = kNone;
  Handle state = kNone;
  Handle keywords = kNone;
};

struct GlobalName {
  std::string module;
  std::string name;
};

struct Tree {
  std::string bytes;
  std::string path;
  Cells cells;
  std::vector<GlobalName> globals;
  std::unordered_map<Handle, Attached> attached;  // what few values have
  Handle root = kNone;

  const unsigned char* raw() const { return reinterpret_cast<const unsigned char*>(bytes.data()); }
  std::uint32_t cell(std::uint32_t i) const { return cells[i]; }
  std::uint32_t head(Handle node) const { return cells[payload_of(node)]; }
  Kind node_kind(Handle node) const { return static_cast<Kind>(head(node) & 15); }
};

}  // namespace internal

namespace {

using internal::Attached;
using internal::Leaf;
using internal::Tree;

constexpr Leaf leaf_of(unsigned char op) {
  switch (op) {
    case 'J':
      return {Kind::kInt, 0, 4};
    case 0x8a:
      return {Kind::kInt, 1, 0};
    case 0x8b:
      return {Kind::kInt, 4, 0};
    case 'G':
      return {Kind::kFloat, 0, 8};
    case 'X':
      return {Kind::kString, 4, 0};
    case 0x8c:
      return {Kind::kString, 1, 0};
    case 0x8d:
      return {Kind::kString, 8, 0};
    case 'T':
      return {Kind::kString, 4, 0};
    case 'U':
      return {Kind::kString, 1, 0};
    case 'B':
      return {Kind::kBytes, 4, 0};
    case 'C':
      return {Kind::kBytes, 1, 0};
    case 0x8e:
      return {Kind::kBytes, 8, 0};
    default:
      return {Kind::kBytes, 8, 0};  // BYTEARRAY8
  }
}

struct LeafBytes {
  Kind kind;
  const unsigned char* data;
  std::size_t size;
};

// The payload of a leaf, whose bounds were checked when it was pushed.
LeafBytes leaf_bytes(const Tree& tree, Handle h) {
  const unsigned char* p = tree.raw() + payload_of(h);
  const Leaf leaf = leaf_of(*p++);
  if (leaf.length_width == 0) return {leaf.kind, p, leaf.fixed};
  return {leaf.kind, p + leaf.length_width, static_cast<std::size_t>(little_endian(p, leaf.length_width))};
}

std::string_view text_of(const LeafBytes& leaf) { return {reinterpret_cast<const char*>(leaf.data), leaf.size}; }

// The stack machine. Steps return false once something is wrong, and `problem_` says what.
class Machine {
 public:
  Machine(Tree& tree, const Limits& limits)
      : tree_(tree), limits_(limits), raw_(tree.raw()), size_(tree.bytes.size()) {}

  Status run() {
    if (!reserve()) return corrupt(tree_.path + ": pickle: no memory to read " + std::to_string(size_) + " bytes");
    if (follow()) return {};
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
    return fail("more than " + with_commas(tree_.cells.capacity()) + " cells");
  }
  [[gnu::cold, gnu::noinline]] bool fail_memo(std::uint32_t i) {
    return fail("expected a memo index that was put, got " + std::to_string(i));
  }

  // Every opcode pushes and remembers one value at most. None takes more than 3 cells for each of its bytes: the worst
  // is a list that is appended to one by one, just after it outgrew eight elements.
  bool reserve() {
    const Index n = static_cast<Index>(size_);
    return stack_.reserve(std::min(limits_.stack, n)) && marks_.reserve(std::min(limits_.stack, n)) &&
           memo_.reserve(std::min(limits_.memo, n)) && tree_.cells.reserve(std::min(limits_.cells, 3 * n + 16));
  }

  // Takes steps until STOP or a failure. The opcodes that are most of a large .metadata are done here, with position
  // and top of the stack in registers, as long as nothing is unusual about them; what is unusual is left to step().
  bool follow() {
    const unsigned char* const end = raw_ + size_;
    const unsigned char* p = raw_;
    Handle* top = stack_.data();
    Handle* const stack_end = top + stack_.capacity();
    while (true) {
      bool is_done = false;
      if (end - p >= 3 && top != stack_end) {
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
            *top++ = kEmptyTuple;
            p += 1;
            continue;
          case 0x85:
          case 0x86: {
            const std::uint32_t n = p[0] - 0x84u;
            const std::uint32_t node = tree_.cells.size();
            if (top - stack_.data() < static_cast<std::ptrdiff_t>(floor_ + n) || !tree_.cells.has_room(1 + n)) break;
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

  bool step() {
    op_at_ = pos_;
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
    if (!leaf(op)) return false;
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
    while (memo_.size() <= i) memo_.push(kUnset);
    if (memo_[i] == kUnset) ++memo_used_;
    memo_[i] = stack_.back();
    return true;
  }
  bool get(std::uint32_t i) {
    if (i >= memo_.size() || memo_[i] == kUnset) return fail_memo(i);
    return push(memo_[i]);
  }

  // A line of text, without its end, into line_at_ and line_size_.
  bool line() {
    const void* end = std::memchr(raw_ + pos_, '\n', size_ - pos_);
    if (end == nullptr) return fail("expected a line, got no end of one");
    line_at_ = pos_;
    line_size_ = static_cast<std::size_t>(static_cast<const unsigned char*>(end) - (raw_ + pos_));
    pos_ += line_size_ + 1;
    return true;
  }
  std::string_view line_text() const { return std::string_view(tree_.bytes).substr(line_at_, line_size_); }
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

  Tree& tree_;
  const Limits& limits_;
  const unsigned char* raw_;
  std::size_t size_;
  std::size_t pos_ = 0;
  std::size_t op_at_ = 0;
  bool stopped_ = false;
  bool unsupported_ = false;
  std::string problem_;

  Cells stack_;
  Cells marks_;              // heights of the stack
  std::uint32_t floor_ = 0;  // the last of them, or 0
  Cells memo_;
  std::uint32_t memo_used_ = 0;
  std::unordered_map<std::string, std::uint32_t> global_index_;  // "module\nname"
  Handle torch_size_ = kUnset;
  Handle ordered_dict_ = kUnset;

  // Results of the steps' parts.
  std::uint32_t node_ = 0;
  std::size_t line_at_ = 0;
  std::size_t line_size_ = 0;
  std::uint32_t line_index_ = 0;
};

}  // namespace

std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::kNone:
      return "None";
    case Kind::kBool:
      return "a bool";
    case Kind::kInt:
      return "an int";
    case Kind::kBigInt:
      return "an int beyond 64 bits";
    case Kind::kFloat:
      return "a float";
    case Kind::kString:
      return "a string";
    case Kind::kBytes:
      return "bytes";
    case Kind::kTuple:
      return "a tuple";
    case Kind::kList:
      return "a list";
    case Kind::kDict:
      return "a dict";
    case Kind::kSet:
      return "a set";
    case Kind::kGlobal:
      return "a global";
    case Kind::kObject:
      return "an object";
    case Kind::kPersistentId:
      return "a persistent id";
  }
  return "";
}

Kind Value::kind() const {
  switch (tag_of(handle_)) {
    case kSmallInt:
      return Kind::kInt;
    case kNode:
      return tree_->node_kind(handle_);
    case kLeaf: {
      const LeafBytes leaf = leaf_bytes(*tree_, handle_);
      if (leaf.kind == Kind::kInt && !decode_long(leaf.data, leaf.size)) return Kind::kBigInt;
      return leaf.kind;
    }
    case kConstant:
      break;
  }
  if (handle_ == kNone) return Kind::kNone;
  if (handle_ == kTrue || handle_ == kFalse) return Kind::kBool;
  return handle_ == kEmptyTuple ? Kind::kTuple : Kind::kGlobal;
}

std::optional<bool> Value::as_bool() const {
  if (handle_ != kTrue && handle_ != kFalse) return std::nullopt;
  return handle_ == kTrue;
}

std::optional<Index> Value::as_int() const {
  if (tag_of(handle_) == kSmallInt) return static_cast<std::int32_t>(handle_) >> 2;
  if (tag_of(handle_) != kLeaf) return std::nullopt;
  const LeafBytes leaf = leaf_bytes(*tree_, handle_);
  if (leaf.kind != Kind::kInt) return std::nullopt;
  return decode_long(leaf.data, leaf.size);
}

std::optional<double> Value::as_float() const {
  if (kind() != Kind::kFloat) return std::nullopt;
  const unsigned char* p = leaf_bytes(*tree_, handle_).data;
  std::uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) bits = bits << 8 | p[i];  // the one big-endian number of a pickle
  return std::bit_cast<double>(bits);
}

std::optional<std::string_view> Value::as_string() const {
  if (tag_of(handle_) != kLeaf) return std::nullopt;
  const LeafBytes leaf = leaf_bytes(*tree_, handle_);
  if (leaf.kind != Kind::kString) return std::nullopt;
  return text_of(leaf);
}

std::optional<std::string_view> Value::as_bytes() const {
  if (tag_of(handle_) != kLeaf) return std::nullopt;
  const LeafBytes leaf = leaf_bytes(*tree_, handle_);
  if (leaf.kind != Kind::kBytes) return std::nullopt;
  return text_of(leaf);
}

std::string Value::big_int_text() const {
  std::string digits;  // two's complement, most significant byte first
  bool negative = false;
  if (kind() == Kind::kBigInt) {
    const LeafBytes leaf = leaf_bytes(*tree_, handle_);
    negative = (leaf.data[leaf.size - 1] & 0x80) != 0;
    for (std::size_t i = leaf.size; i-- > 0;) digits += static_cast<char>(leaf.data[i]);
  } else if (const std::optional<Index> v = as_int()) {
    negative = *v < 0;
    for (int shift = 56; shift >= 0; shift -= 8) digits += static_cast<char>(static_cast<std::uint64_t>(*v) >> shift);
  } else {
    return "";
  }
  if (negative) {  // the magnitude: invert and add one
    bool carry = true;
    for (std::size_t i = digits.size(); i-- > 0;) {
      const unsigned v = (static_cast<unsigned char>(digits[i]) ^ 0xffu) + (carry ? 1u : 0u);
      digits[i] = static_cast<char>(v);
      carry = v > 0xff;
    }
  }
  std::string out;
  for (char c : digits)
    for (int shift : {4, 0}) out += "0123456789abcdef"[static_cast<unsigned char>(c) >> shift & 15];
  out.erase(0, std::min(out.find_first_not_of('0'), out.size() - 1));
  return (negative ? "-0x" : "0x") + out;
}

std::size_t Value::size() const {
  if (tag_of(handle_) != kNode) return 0;
  const Kind k = kind();
  if (k == Kind::kObject || k == Kind::kPersistentId) return 0;
  return tree_->head(handle_) >> 4;
}

Value Value::operator[](std::size_t i) const {
  const Kind k = kind();
  if (i >= size() || k == Kind::kDict) return at(kNone);
  const std::uint32_t node = payload_of(handle_);
  const std::uint32_t first = k == Kind::kTuple ? node + 1 : tree_->cell(node + 1);
  return at(tree_->cell(first + static_cast<std::uint32_t>(i)));
}

Value Value::key(std::size_t i) const {
  if (i >= size() || kind() != Kind::kDict) return at(kNone);
  return at(tree_->cell(tree_->cell(payload_of(handle_) + 1) + 2 * static_cast<std::uint32_t>(i)));
}

Value Value::value(std::size_t i) const {
  if (i >= size() || kind() != Kind::kDict) return at(kNone);
  return at(tree_->cell(tree_->cell(payload_of(handle_) + 1) + 2 * static_cast<std::uint32_t>(i) + 1));
}

std::optional<Value> Value::find(std::string_view wanted) const {
  if (kind() != Kind::kDict) return std::nullopt;
  for (std::size_t i = size(); i-- > 0;)
    if (key(i).as_string() == wanted) return value(i);
  return std::nullopt;
}

std::string_view Value::module() const {
  return kind() == Kind::kGlobal ? tree_->globals[payload_of(handle_) - kFirstGlobal].module : std::string_view();
}

std::string_view Value::name() const {
  return kind() == Kind::kGlobal ? tree_->globals[payload_of(handle_) - kFirstGlobal].name : std::string_view();
}

bool Value::is_global(std::string_view wanted_module, std::string_view wanted_name) const {
  return kind() == Kind::kGlobal && name() == wanted_name && module() == wanted_module;
}

Value Value::callee() const { return kind() == Kind::kObject ? at(tree_->cell(payload_of(handle_) + 1)) : at(kNone); }

Value Value::args() const {
  if (kind() != Kind::kObject) return at(kNone);
  return at(tree_->head(handle_) >> 4 == 0 ? kEmptyTuple : tree_->cell(payload_of(handle_) + kArgs));
}

Value Value::state() const {
  if (kind() == Kind::kObject) return at(tree_->cell(payload_of(handle_) + kState));
  const auto it = tree_->attached.find(handle_);
  return at(it == tree_->attached.end() ? kNone : it->second.state);
}

Value Value::keywords() const {
  const auto it = tree_->attached.find(handle_);
  return at(it == tree_->attached.end() ? kNone : it->second.keywords);
}

Value Value::items() const {
  const auto it = tree_->attached.find(handle_);
  return at(it == tree_->attached.end() ? kNone : it->second.items);
}

bool Value::is_object(std::string_view wanted_module, std::string_view wanted_name) const {
  return callee().is_global(wanted_module, wanted_name);
}

Value Value::persistent_id() const {
  return kind() == Kind::kPersistentId ? at(tree_->cell(payload_of(handle_) + 1)) : at(kNone);
}

Error Value::mismatch(std::string_view what, std::string_view expected) const {
  std::string got(kind_name(kind()));
  switch (kind()) {
    case Kind::kTuple:
    case Kind::kList:
    case Kind::kDict:
    case Kind::kSet:
      got += " of " + std::to_string(size());
      break;
    case Kind::kNone:
      break;
    default:
      got += " " + print(*this, 1, 4);
  }
  return corrupt(tree_->path + ": " + std::string(what) + ": expected " + std::string(expected) + ", got " + got);
}

Document::Document(std::unique_ptr<const Tree> tree) : tree_(std::move(tree)) {}
Document::Document(Document&&) noexcept = default;
Document& Document::operator=(Document&&) noexcept = default;
Document::~Document() = default;

Value Document::root() const { return {tree_.get(), tree_->root}; }

std::vector<std::string> Document::globals() const {
  std::vector<std::string> out;
  for (const internal::GlobalName& g : tree_->globals) out.push_back(g.module + "." + g.name);
  return out;
}

std::string_view Document::bytes() const { return tree_->bytes; }
Index Document::cells() const { return tree_->cells.size(); }

Result<Document> parse(std::string bytes, std::string_view path, const Limits& limits) {
  if (static_cast<Index>(bytes.size()) > std::min(limits.bytes, Limits{}.bytes))
    return unsupported(std::string(path) + ": pickle: expected at most " +
                       with_commas(std::min(limits.bytes, Limits{}.bytes)) + " bytes, got " +
                       with_commas(static_cast<Index>(bytes.size())));
  auto tree = std::make_unique<Tree>();
  tree->bytes = std::move(bytes);
  tree->path = path;
  Limits capped = limits;
  capped.cells = std::min(limits.cells, Index{1} << 30);
  capped.memo = std::min(limits.memo, Limits{}.bytes);
  capped.globals = std::min(limits.globals, Index{1} << 24);
  TRY(Machine(*tree, capped).run());
  return Document(std::move(tree));
}

namespace {

class Printer {
 public:
  Printer(int max_depth, int max_items) : max_depth_(max_depth), max_items_(static_cast<std::size_t>(max_items)) {}

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

  // The shortest text that reads back as the same number.
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

  void object(Value v, int depth) {
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
