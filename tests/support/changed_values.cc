#include "tests/support/changed_values.h"

#include <cstdint>
#include <map>
#include <stdexcept>
#include <utility>

#include "formats/encoding/zip.h"
#include "lib/base/file.h"

namespace reshard {
namespace {

// Elements and members that are changed in a container; the outermost dict has a larger limit.
constexpr std::size_t kFirstElements = 2, kMembers = 4, kOutermost = 40;

const std::pair<const char*, std::string> kValues[] = {{"None", "N"},
                                                       {"7", "K\x07"},
                                                       {"-1", "J\xff\xff\xff\xff"},
                                                       {"2^71", std::string("\x8a\x0a\0\0\0\0\0\0\0\0\x80\0", 12)},
                                                       {"'z'", {"X\1\0\0\0z", 6}},
                                                       {"[]", "]"},
                                                       {"{}", "}"},
                                                       {"()", ")"}};

// A value on the pickle machine's stack, and the range of opcodes that produced it.
struct StackValue {
  std::size_t begin = 0, end = 0;
  std::string label;  // if the value is a key
  bool is_mark = false, is_sequence = false;
  std::vector<std::pair<std::string, std::size_t>> children;  // names and indices into nodes_
};

class Machine {
 public:
  explicit Machine(const std::string& bytes) : bytes_(bytes) {}

  // Runs the pickle and returns the index of its value in nodes_.
  std::size_t run() {
    while (at_ < bytes_.size()) {
      const std::size_t begin = at_;
      const auto op = static_cast<unsigned char>(bytes_[at_++]);
      if (op == '.') return pop();
      step(op, begin);
    }
    throw std::runtime_error("a pickle without an end");
  }
  const StackValue& node(std::size_t n) const { return nodes_[n]; }
  // Returns whether a later opcode refers to a part of the value.
  bool is_shared(const StackValue& n) const {
    for (const auto& [index, put] : puts_)
      if (put >= n.begin && put < n.end)
        for (auto [get, last] = gets_.equal_range(index); get != last; ++get)
          if (get->second >= n.end) return true;
    return false;
  }

 private:
  std::uint64_t number(std::size_t width) {
    std::uint64_t out = 0;
    for (std::size_t i = 0; i < width; ++i)
      out |= std::uint64_t{static_cast<unsigned char>(bytes_.at(at_ + i))} << 8 * i;
    at_ += width;
    return out;
  }
  std::size_t pop() {
    const std::size_t out = stack_.back();
    stack_.pop_back();
    return out;
  }
  void push(std::size_t begin, std::string label = "", bool is_mark = false) {
    stack_.push_back(nodes_.size());
    nodes_.push_back({begin, at_, std::move(label), is_mark, false, {}});
  }
  void push_scalar(std::size_t begin, std::size_t length_width, std::size_t fixed = 0) {
    const std::size_t length = length_width > 0 ? number(length_width) : fixed;
    at_ += length;
    push(begin, bytes_.substr(at_ - length, length));
  }
  // Pops the values above the last mark, and the mark.
  std::vector<std::size_t> above_mark() {
    std::vector<std::size_t> out;
    while (!nodes_[stack_.back()].is_mark) out.insert(out.begin(), pop());
    return out;
  }
  void add_elements(std::size_t container, const std::vector<std::size_t>& elements) {
    StackValue& c = nodes_[container];
    for (const std::size_t e : elements) c.children.emplace_back(std::to_string(c.children.size()), e);
    c.is_sequence = true;
    c.end = at_;
  }
  void add_members(std::size_t dict, const std::vector<std::size_t>& pairs) {
    for (std::size_t i = 0; i + 1 < pairs.size(); i += 2) {
      nodes_[dict].children.emplace_back("keys." + nodes_[pairs[i]].label, pairs[i]);
      nodes_[dict].children.emplace_back(nodes_[pairs[i]].label, pairs[i + 1]);
    }
    nodes_[dict].end = at_;
  }
  void tuple_of(const std::vector<std::size_t>& elements, std::size_t begin) {
    push(begin);
    add_elements(stack_.back(), elements);
  }
  // Replaces the top `count` values by an object with these member names.
  void call(std::size_t count, std::initializer_list<const char*> names) {
    std::vector<std::size_t> parts;
    for (std::size_t i = 0; i < count; ++i) parts.insert(parts.begin(), pop());
    push(nodes_[parts.front()].begin);
    auto name = names.begin();
    for (const std::size_t part : parts) nodes_[stack_.back()].children.emplace_back(*name++, part);
  }

  void step(unsigned char op, std::size_t begin) {
    switch (op) {
      case 0x80:
        at_ += 1;
        return;
      case 'N':
      case 0x88:
      case 0x89:
      case ')':
      case ']':
      case '}':
      case 0x8f:
        return push(begin);
      case 'K':
        at_ += 1;
        return push(begin, std::to_string(static_cast<unsigned char>(bytes_[at_ - 1])));
      case 'M':
        return push_scalar(begin, 0, 2);
      case 'J':
        return push_scalar(begin, 0, 4);
      case 'G':
        return push_scalar(begin, 0, 8);
      case 0x8a:
      case 0x8c:
      case 'U':
      case 'C':
        return push_scalar(begin, 1);
      case 'X':
      case 'T':
      case 'B':
      case 0x8b:
        return push_scalar(begin, 4);
      case 0x8d:
      case 0x8e:
      case 0x96:
        return push_scalar(begin, 8);
      case 'c':
        for (int line = 0; line < 2; ++line) at_ = bytes_.find('\n', at_) + 1;
        return push(begin);
      case 0x93:
        return call(2, {"module", "name"});
      case '(':
        return push(begin, "", true);
      case 't':
      case 'l': {
        const auto elements = above_mark();
        const std::size_t mark = pop();
        return tuple_of(elements, nodes_[mark].begin);
      }
      case 0x85:
      case 0x86:
      case 0x87: {
        std::vector<std::size_t> elements;
        for (int i = 0; i < op - 0x84; ++i) elements.insert(elements.begin(), pop());
        return tuple_of(elements, nodes_[elements.front()].begin);
      }
      case 'e':
      case 0x90: {
        const auto elements = above_mark();
        pop();
        return add_elements(stack_.back(), elements);
      }
      case 'a': {
        const std::size_t element = pop();
        return add_elements(stack_.back(), {element});
      }
      case 'u': {
        const auto pairs = above_mark();
        pop();
        return add_members(stack_.back(), pairs);
      }
      case 's': {
        const std::size_t value = pop(), key = pop();
        return add_members(stack_.back(), {key, value});
      }
      case 'R':
      case 0x81:
        return call(2, {"callee", "args"});
      case 'b':
        return call(2, {"object", "state"});
      case 'Q':
        return call(1, {"id"});
      case 'q':
      case 'r': {
        const auto index = number(op == 'q' ? 1 : 4);
        puts_.emplace(index, begin);
        nodes_[stack_.back()].end = at_;
        return;
      }
      case 0x94:
        puts_.emplace(puts_.size(), begin);
        nodes_[stack_.back()].end = at_;
        return;
      case 'h':
      case 'j': {
        const auto index = number(op == 'h' ? 1 : 4);
        gets_.emplace(index, begin);
        return push(begin);
      }
      default:
        throw std::runtime_error("opcode " + std::to_string(op));
    }
  }

  const std::string& bytes_;
  std::size_t at_ = 0;
  std::vector<StackValue> nodes_;
  std::vector<std::size_t> stack_;
  std::map<std::uint64_t, std::size_t> puts_;
  std::multimap<std::uint64_t, std::size_t> gets_;
};

// Removes the frame opcodes, which only tell a reader how far it may buffer.
std::string without_frames(const std::string& pickle) {
  if (pickle.size() < 11 || pickle[2] != '\x95') return pickle;
  std::string out = pickle.substr(0, 2);
  for (std::size_t at = 2; at < pickle.size();) {
    if (pickle[at] != '\x95') return out + pickle.substr(at);
    std::uint64_t length = 0;
    for (std::size_t i = 0; i < 8; ++i)
      length |= std::uint64_t{static_cast<unsigned char>(pickle.at(at + 1 + i))} << 8 * i;
    out += pickle.substr(at + 9, length);
    at += 9 + length;
  }
  return out;
}

void change(const Machine& reader, std::size_t n, const std::string& place, const std::string& pickle,
            std::vector<ChangedPickle>& out) {
  const StackValue& node = reader.node(n);
  if (!reader.is_shared(node))
    for (const auto& [name, bytes] : kValues)
      out.push_back({place, name, pickle.substr(0, node.begin) + bytes + pickle.substr(node.end)});
  const std::size_t most = node.is_sequence ? kFirstElements : 2 * (place == "root" ? kOutermost : kMembers);
  for (std::size_t i = 0; i < node.children.size() && i < most; ++i)
    change(reader, node.children[i].second, place + "." + node.children[i].first, pickle, out);
}

File file_of(const std::string& bytes) {
  File file = *File::create_in_memory();
  (void)file.write_at(0, as_bytes(bytes));
  return file;
}

}  // namespace

std::vector<ChangedPickle> changed_pickles(const std::string& pickle) {
  const std::string plain = without_frames(pickle);
  Machine reader(plain);
  const std::size_t root = reader.run();
  std::vector<ChangedPickle> out;
  change(reader, root, "root", plain, out);
  return out;
}

std::string pickle_of(const std::string& file) {
  if (!file.starts_with(zip::kMagic)) return file;
  const File whole = file_of(file);
  const auto archive = *zip::Archive::open(whole, 0, std::ssize(file));
  for (const zip::Entry& e : archive.entries())
    if (e.name.ends_with("/data.pkl")) return *archive.read(e, e.size);
  throw std::runtime_error("an archive without data.pkl");
}

std::string with_pickle(const std::string& file, const std::string& pickle) {
  if (!file.starts_with(zip::kMagic)) return pickle;
  const File whole = file_of(file);
  const auto archive = *zip::Archive::open(whole, 0, std::ssize(file));
  zip::Builder builder(0);
  for (const zip::Entry& e : archive.entries())
    builder.add(e.name, e.name.ends_with("/data.pkl") ? pickle : *archive.read(e, e.size));
  return std::move(builder).finish().before;
}

}  // namespace reshard
