// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/torch_file.h"

#include <algorithm>
#include <array>
#include <unordered_set>
#include <utility>
#include <vector>

#include "formats/encoding/zip.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

using pickle::Kind;
using pickle::Value;

constexpr Index kMaxByteorderBytes = 16;
constexpr Index kFirstWindow = Index{64} << 10;                // the first bytes of a stream, read at once
constexpr std::string_view kProgramMember = "archive_format";  // of torch.export's archives (torch/export/pt2_archive)
constexpr std::string_view kPreviewMagic = "PYTORCH1";
constexpr std::string_view kTarMagic = "ustar";
constexpr std::size_t kTarMagicAt = 257;
// The first pickle of a stream, the integer 0x1950a86a20f9469cfc6c, after its protocol and, from protocol 4 on, its
// frame.
constexpr std::string_view kStreamMagic{"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e", 13};
constexpr std::size_t kMaxStreamMagicAt = 11;
constexpr Index kStreamProtocol = 1001;

bool is_stream(std::string_view head) {
  if (!head.starts_with('\x80')) return false;
  return head.substr(0, kMaxStreamMagicAt + kStreamMagic.size()).find(kStreamMagic) != std::string_view::npos;
}

bool is_tar(std::string_view head) {
  return head.size() >= kTarMagicAt + kTarMagic.size() && head.substr(kTarMagicAt, kTarMagic.size()) == kTarMagic;
}

// Returns whether a zip looks like torch.save's: all members are in one directory, and the first has one of a few
// names.
bool is_torch_zip(std::string_view head) {
  constexpr std::size_t kNameLengthAt = 26, kNameAt = 30;
  if (!head.starts_with(zip::kMagic) || head.size() < kNameAt) return false;
  const auto byte = [&](std::size_t i) { return static_cast<std::size_t>(static_cast<unsigned char>(head[i])); };
  const std::string_view name = head.substr(kNameAt, byte(kNameLengthAt) | byte(kNameLengthAt + 1) << 8);
  const std::size_t slash = name.find('/');
  if (slash == std::string_view::npos) return false;
  const std::string_view member = name.substr(slash + 1);
  static constexpr std::array<std::string_view, 7> kMembers = {
      "data.pkl", "version", "byteorder", ".format_version", ".storage_alignment", "constants.pkl", kProgramMember};
  return member.starts_with("data/") || member.starts_with("code/") ||
         std::find(kMembers.begin(), kMembers.end(), member) != kMembers.end();
}

// ---- Values

Result<Dims> read_dims(Value v, std::string_view what) {
  if (v.kind() != Kind::kTuple) return v.mismatch(what, "a tuple");
  if (v.size() > std::size_t{kMaxRank}) return v.mismatch(what, "at most " + std::to_string(kMaxRank) + " dimensions");
  Dims out;
  for (std::size_t i = 0; i < v.size(); ++i) {
    const std::optional<Index> n = v[i].as_int();
    if (!n || *n < 0) return v[i].mismatch(what, "an integer of 0 or more");
    out.push_back(*n);
  }
  return out;
}

Result<Index> read_count(Value v, std::string_view what) {
  const std::optional<Index> n = v.as_int();
  if (!n || *n < 0) return v.mismatch(what, "an integer of 0 or more");
  return *n;
}

bool is_wrapper_of_parameter(Value callee) {
  return callee.is_global("torch._utils", "_rebuild_parameter") ||
         callee.is_global("torch._utils", "_rebuild_parameter_with_state");
}
bool is_wrapper_of_subclass(Value callee) {
  return callee.is_global("torch._tensor", "_rebuild_from_type_v2") ||
         callee.is_global("torch._tensor", "_rebuild_from_type");
}

// The call that makes a tensor, inside the wrappers of a Parameter or of a tensor with attributes.
struct Rebuild {
  Value callee;
  Value args;
  std::optional<Value> declared;  // of a tensor that a class made of one other: (class, dtype, size, ...)
};

// The attributes of a tensor whose class has no storage of its own and computes with other tensors.
struct Attributes {
  std::vector<Value> tensors;
  std::vector<std::string> names;  // of the tensors
  bool has_float = false;          // perhaps a scale
};

// Reads the state of an instance: its attributes, or (attributes or None, slots).
Attributes read_attributes(Value state) {
  Attributes out;
  const auto add = [&out](Value members) {
    for (std::size_t i = 0; members.kind() == Kind::kDict && i < members.size(); ++i) {
      const Value v = members.value(i);
      out.has_float |= v.kind() == Kind::kFloat;
      if (!makes_torch_tensor(v)) continue;
      out.tensors.push_back(v);
      out.names.push_back(pickle::print(members.key(i), 1, 1));
    }
  };
  add(state);
  for (std::size_t i = 0; state.kind() == Kind::kTuple && i < state.size(); ++i) add(state[i]);
  return out;
}

// Returns whether the arguments of a wrapper of a subclass, (function, type, arguments, state), are of a tensor that
// has no storage of its own and is not one rank's part of another.
bool is_computed(Value args) {
  return args.size() >= 4 && args[0].is_global("torch._utils", "_rebuild_wrapper_subclass") &&
         args[1].kind() == Kind::kGlobal && !args[1].module().starts_with("torch.distributed");
}

// Returns the dtype in (class, dtype, size, ...).
std::optional<DType> declared_dtype(Value declared) {
  if (declared.kind() != Kind::kTuple || declared.size() < 3 || declared[1].module() != "torch") return std::nullopt;
  return dtype_from_torch(declared[1].name());
}

std::optional<Index> checked_bytes(const Dims& shape, DType dtype) {
  const std::optional<Index> elements = checked_volume(shape);
  return elements ? checked_mul(*elements, byte_size(dtype)) : std::nullopt;
}

// Describes a tensor whose values a class computes from what `source` names.
Error unread_tensor(std::string_view place, Value type, const std::string& source) {
  return unsupported(std::string(place) + ": tensor: made by " + pickle::print(type) + " from " + source +
                     ": its values are computed by the code of that class; save its dequantize() or float(), or leave "
                     "it out with --exclude or --part");
}

Result<Rebuild> unwrap(Value root, std::string_view place) {
  if (root.kind() != Kind::kObject) return root.mismatch("tensor", "a tensor");
  Rebuild r{root.callee(), root.args(), std::nullopt};
  // Wrappers are few: a Parameter of a tensor of a class around a tensor with attributes.
  for (int depth = 0; depth < 4; ++depth) {
    const std::string name(r.callee.name());
    if (is_wrapper_of_parameter(r.callee)) {
      if (r.args.size() < 1 || r.args[0].kind() != Kind::kObject)
        return r.args.mismatch(name, "a tensor as first argument");
      r = {r.args[0].callee(), r.args[0].args(), r.declared};
    } else if (is_wrapper_of_subclass(r.callee)) {
      if (r.args.size() < 3 || r.args[2].kind() != Kind::kTuple)
        return r.args.mismatch(name, "(function, type, arguments, state)");
      const Value type = r.args[1];
      if (!is_computed(r.args)) {
        r = {r.args[0], r.args[2], r.declared};
        continue;
      }
      // A class that changes how a weight is multiplied and stored as it is, such as torchao's for float8 training.
      const Attributes attributes = read_attributes(r.args[3]);
      if (attributes.tensors.size() != 1 || attributes.has_float)
        return unread_tensor(place, type, attributes.names.empty() ? "no tensor" : join(attributes.names, ", "));
      const Value inner = attributes.tensors.front();
      r = {inner.callee(), inner.args(), r.args[2]};
    } else {
      return r;
    }
  }
  return unsupported(std::string(place) + ": tensor: wrapped more than 4 times");
}

// Describes the unsupported kind of tensor that a function of torch._utils makes, and what the user can do.
std::string_view explanation(std::string_view function) {
  struct Row {
    std::string_view part, text;
  };
  static constexpr std::array<Row, 7> kRows = {{
      {"qtensor", "a quantized tensor: save dequantize(), or int_repr() and the scales"},
      {"sparse", "a sparse tensor: save its to_dense()"},
      {"nested", "a nested tensor: save its unbind()"},
      {"meta", "a tensor on the meta device, which has no values"},
      {"wrapper_subclass",
       "a tensor that is spread over ranks or computed (DTensor, ShardedTensor): the file contains one rank's part of "
       "it, "
       "not its position; save its full_tensor(), or the whole with torch.distributed.checkpoint"},
      {"device_tensor", "a tensor of a device without storages: save its cpu()"},
      {"xla", "a tensor of a device without storages: save its cpu()"},
  }};
  for (const Row& row : kRows)
    if (function.find(row.part) != std::string_view::npos) return row.text;
  return "only plain strided tensors (_rebuild_tensor_v2 and _v3) are supported";
}

// Fails with kUnsupported if a tensor is marked conj or neg, as its stored elements would have to be conjugated or
// negated.
Status refuse_lazy_math(Value metadata, std::string_view place) {
  if (metadata.is_none()) return {};
  if (metadata.kind() != Kind::kDict) return metadata.mismatch("tensor metadata", "a dict");
  for (std::size_t i = 0; i < metadata.size(); ++i) {
    const bool is_off = metadata.value(i).as_bool() == false;
    if (!is_off)
      return unsupported(std::string(place) + ": tensor: has its " + pickle::print(metadata.key(i), 1, 1) +
                         " bit set; save it after resolve_conj() and resolve_neg()");
  }
  return {};
}

constexpr Index kMostRepeats = 4096;
constexpr Index kFreeRepeated = Index{1} << 30;

// Returns the bytes of the storage up to the last element that the strides reach, or nothing on overflow.
std::optional<Index> reach(const StoredTensor& t) {
  Index last = 0;
  for (int d = 0; d < t.shape().rank(); ++d) {
    const std::optional<Index> step = checked_mul(t.shape()[d] - 1, t.strides[d]);
    const std::optional<Index> sum = step ? checked_add(last, *step) : std::nullopt;
    if (!sum) return std::nullopt;
    last = *sum;
  }
  const std::optional<Index> end = checked_add(last, 1);
  const std::optional<Index> bytes = end ? checked_mul(*end, byte_size(t.dtype)) : std::nullopt;
  return bytes ? checked_add(t.start, *bytes) : std::nullopt;
}

Status check_reach(const StoredTensor& t, std::string_view place) {
  const std::optional<Index> elements = checked_volume(t.shape());
  if (!elements || !checked_mul(*elements, byte_size(t.dtype)))
    return corrupt(std::string(place) + ": tensor: shape " + to_string(t.shape()) + " has more than 2^63 bytes");
  if (*elements == 0) return {};
  const std::optional<Index> end = reach(t);
  if (!end || *end > t.extent.length)
    return corrupt(std::string(place) + ": tensor: shape " + to_string(t.shape()) + " with strides " +
                   to_string(t.strides) + " from byte " + std::to_string(t.start) +
                   " on: expected to stay inside the storage of " + bytes_of(t.extent.length) + ", got " +
                   (end ? std::to_string(*end) : "an overflow"));
  // expand() makes tensors of any size with strides of 0.
  const Index most = checked_mul(t.extent.length, kMostRepeats).value_or(INT64_MAX - kFreeRepeated) + kFreeRepeated;
  if (const Index bytes = *elements * byte_size(t.dtype); bytes > most)
    return unsupported(std::string(place) + ": tensor: shape " + to_string(t.shape()) + " with strides " +
                       to_string(t.strides) + " repeats the storage's " + bytes_of(t.extent.length) + " to " +
                       with_commas(bytes) + "; no more than " + std::to_string(kMostRepeats) +
                       " times is read. Save the tensor before expand()");
  return {};
}

// Fails with kUnsupported if the tensor inside an instance of a class has another dtype or size than the instance.
Status check_declared(Value declared, const StoredTensor& t, std::string_view place) {
  if (declared.size() < 3) return declared.mismatch("tensor arguments", "(class, dtype, size, ...)");
  if (declared_dtype(declared) == t.dtype && TRY(read_dims(declared[2], "tensor size")) == t.shape()) return {};
  return unread_tensor(place, declared[0], type_text(t));
}

// Returns the values directly below a value.
std::vector<Value> children(Value v) {
  std::vector<Value> out;
  if (v.kind() == Kind::kDict) {
    for (std::size_t i = 0; i < v.size(); ++i) {
      out.push_back(v.key(i));
      out.push_back(v.value(i));
    }
  } else if (v.kind() == Kind::kObject) {
    out = {v.callee(), v.args()};
  } else {
    for (std::size_t i = 0; i < v.size(); ++i) out.push_back(v[i]);
  }
  for (const Value& extra : {v.state(), v.keywords(), v.items()})
    if (!extra.is_none()) out.push_back(extra);
  return out;
}

bool is_branch(Value v) {
  switch (v.kind()) {
    case Kind::kTuple:
    case Kind::kList:
    case Kind::kDict:
    case Kind::kSet:
    case Kind::kObject:
    case Kind::kPersistentId:
      return true;
    default:
      return false;
  }
}

// ---- Streams

// The pickles at the beginning of a stream, read one after the other.
class PickleStream {
 public:
  PickleStream(const File& file, Index offset, Index length) : file_(file), offset_(offset), length_(length) {}

  Result<pickle::Document> next(std::string_view what, Index max_bytes) {
    const std::string place = at(file_.path(), offset_ + position_) + ": " + std::string(what);
    std::optional<Index> n;
    while (true) {
      const auto rest = std::string_view(buffer_).substr(position_);
      n = pickle::length_of(rest);
      if (n || std::ssize(buffer_) == length_) break;
      if (std::ssize(rest) > max_bytes)
        return unsupported(place + ": expected a pickle of at most " + count_of(max_bytes, "byte"));
      TRY(read_on());
    }
    const Index size = n.value_or(length_ - position_);
    if (size > max_bytes)
      return unsupported(place + ": expected a pickle of at most " + count_of(max_bytes, "byte") + ", got " +
                         with_commas(size));
    std::string bytes = buffer_.substr(position_, size);
    position_ += size;
    return pickle::parse(std::move(bytes), place);
  }

  Index position() const { return position_; }  // from the stream's first byte

 private:
  Status read_on() {
    const Index old_size = std::ssize(buffer_);
    const Index size = std::min(std::max(2 * old_size, kFirstWindow), length_);
    buffer_.resize(size);
    return file_.read_at(offset_ + old_size, std::as_writable_bytes(std::span(buffer_).subspan(old_size)));
  }

  const File& file_;
  Index offset_;
  Index length_;
  Index position_ = 0;
  std::string buffer_;  // from the stream's first byte
};

Status check_sys_info(Value v) {
  if (v.kind() != Kind::kDict) return v.mismatch("sys_info", "a dict");
  const std::optional<Value> protocol = v.find("protocol_version");
  if (!protocol || protocol->as_int() != kStreamProtocol)
    return v.mismatch("sys_info", "a protocol_version of " + std::to_string(kStreamProtocol));
  return {};
}

}  // namespace

// A persistent id: ('storage', class, key, location, elements), and in streams a view as sixth.
struct TorchFile::Reference {
  std::string key;
  std::optional<DType> dtype;  // from the class; nothing for an UntypedStorage, which counts bytes
  Index bytes = 0;             // of the whole storage
  Index start_bytes = 0;       // offset of the view in it

  Index width() const { return dtype ? byte_size(*dtype) : 1; }
};

bool makes_torch_tensor(Value value) {
  if (value.kind() != Kind::kObject) return false;
  const Value callee = value.callee();
  return is_wrapper_of_subclass(callee) || (callee.module() == "torch._utils" && callee.name().starts_with("_rebuild"));
}

std::optional<StoredTensor> computed_tensor(Value value) {
  while (value.kind() == Kind::kObject && is_wrapper_of_parameter(value.callee()) && value.args().size() > 0)
    value = value.args()[0];
  if (value.kind() != Kind::kObject || !is_wrapper_of_subclass(value.callee()) || value.args().size() < 4)
    return std::nullopt;
  const Value args = value.args();
  if (!is_computed(args)) return std::nullopt;
  const Value declared = args[2];
  const auto dtype = declared_dtype(declared);
  const auto shape = dtype ? read_dims(declared[2], "tensor size") : Result<Dims>(Dims());
  if (!dtype || !shape || !checked_bytes(*shape, *dtype)) return std::nullopt;
  StoredTensor out;
  out.dtype = *dtype;
  out.box = whole(*shape);
  out.strides = row_major_strides(*shape);
  return out;
}

bool TorchFile::recognises(std::string_view head) {
  return is_torch_zip(head) || is_stream(head) || head.starts_with(kPreviewMagic) || is_tar(head);
}

Result<TorchFile::Reference> TorchFile::read_reference(Value value, std::string_view place) {
  const Value id = value.persistent_id();
  if (id.kind() != Kind::kTuple || (id.size() != 5 && id.size() != 6) || id[0].as_string() != "storage")
    return id.mismatch("storage", "('storage', type, key, location, size)");
  const Value type = id[1];
  if (type.kind() != Kind::kGlobal) return type.mismatch("storage type", "a class");
  const std::optional<std::string_view> key = id[2].as_string();
  if (!key) return id[2].mismatch("storage key", "a string");
  Reference out;
  out.key = *key;
  if (!type.is_global("torch.storage", "UntypedStorage")) {
    out.dtype = type.module() == "torch" ? dtype_from_storage_class(type.name()) : std::nullopt;
    if (!out.dtype)
      return unsupported(std::string(place) + ": tensor: storage type " + pickle::print(type) + " is not supported");
  }
  const std::optional<Index> bytes = checked_mul(TRY(read_count(id[4], "storage size")), out.width());
  if (!bytes) return id[4].mismatch("storage size", "a size that fits 63 bits");
  out.bytes = *bytes;
  if (id.size() == 5 || id[5].is_none()) return out;
  const Value view = id[5];
  if (view.kind() != Kind::kTuple || view.size() != 3) return view.mismatch("storage view", "(key, offset, size)");
  const std::optional<Index> start = checked_mul(TRY(read_count(view[1], "storage view offset")), out.width());
  const std::optional<Index> size = checked_mul(TRY(read_count(view[2], "storage view size")), out.width());
  if (!start || !size || !fits_inside(*start, *size, out.bytes))
    return view.mismatch("storage view", "a part of the storage's " + bytes_of(out.bytes));
  out.start_bytes = *start;
  return out;
}

Result<std::unordered_map<std::string, TorchFile::Reference>> TorchFile::references_of(Value root,
                                                                                       std::string_view place) {
  std::unordered_map<std::string, Reference> out;
  std::unordered_set<std::uint32_t> seen;
  std::vector<Value> ahead = {root};
  while (!ahead.empty()) {
    const Value v = ahead.back();
    ahead.pop_back();
    if (!is_branch(v) || !seen.insert(v.identity()).second) continue;
    if (v.kind() != Kind::kPersistentId) {
      const std::vector<Value> below = children(v);
      ahead.insert(ahead.end(), below.begin(), below.end());
      continue;
    }
    const Value id = v.persistent_id();
    // A class saved with its source code, which has no storage.
    if (id.kind() == Kind::kTuple && id.size() > 0 && id[0].as_string() == "module") continue;
    Reference reference = TRY(read_reference(v, place));
    const auto [it, is_new] = out.try_emplace(reference.key, reference);
    if (!is_new && (it->second.width() != reference.width() || it->second.bytes != reference.bytes))
      return id.mismatch("storage '" + printable(reference.key) + "'", bytes_of(it->second.bytes) + " in elements of " +
                                                                           std::to_string(it->second.width()) +
                                                                           ", as in another reference");
  }
  return out;
}

Result<TorchFile> TorchFile::open(const File& file, Index offset, Index length, Index max_pickle_bytes) {
  std::string head(std::clamp<Index>(length, 0, kHeadBytes), '\0');
  TRY(file.read_at(offset, std::as_writable_bytes(std::span(head))));
  const std::string place = at(file.path(), offset);
  if (head.starts_with(kPreviewMagic))
    return unsupported(
        place + ": the container of PyTorch 1.5's preview (PYTORCH1); load it with that version and save it again");
  if (is_tar(head))
    return unsupported(
        place +
        ": a tar archive; unpack it with tar -xf and open what it contains. If torch.save wrote it, before "
        "0.1.10, load it with torch.load and save it again");
  if (is_stream(head)) return open_stream(file, offset, length, max_pickle_bytes);
  return open_zip(file, offset, length, max_pickle_bytes);
}

Result<TorchFile> TorchFile::open_zip(const File& file, Index offset, Index length, Index max_pickle_bytes) {
  const std::string place = at(file.path(), offset);
  const Error script =
      unsupported(place + ": a TorchScript archive: load it with torch.jit.load and torch.save its state_dict()");
  auto opened = zip::Archive::open(file, offset, length);
  // TorchScript compresses its sources; other members are never compressed.
  if (!opened && opened.error().code() == ErrorCode::kUnsupported &&
      opened.error().message().find("/code/") != std::string::npos)
    return script;
  const zip::Archive archive = TRY(std::move(opened));
  if (archive.entries().empty()) return corrupt(place + ": torch archive: no members");
  const std::string& first = archive.entries().front().name;
  const std::size_t slash = first.find('/');
  if (slash == std::string::npos)
    return corrupt(place + ": torch archive: expected members in a directory, got '" + printable(first) + "'");
  const std::string prefix = first.substr(0, slash + 1);
  for (const zip::Entry& e : archive.entries()) {
    if (!e.name.starts_with(prefix))
      return corrupt(place + ": torch archive: expected members in '" + printable(prefix) + "', got '" +
                     printable(e.name) + "'");
    if (std::string_view member = std::string_view(e.name).substr(prefix.size());
        member == "constants.pkl" || member.starts_with("code/"))
      return script;
  }
  if (archive.find(prefix + std::string(kProgramMember)) != nullptr)
    return unsupported(place + ": torch.export's program archive: load it with torch.export.load and torch.save its " +
                       "state_dict");
  const zip::Entry* entry = archive.find(prefix + "data.pkl");
  if (entry == nullptr) return corrupt(place + ": torch archive: no member '" + printable(prefix + "data.pkl") + "'");
  TorchFile out(place,
                TRY(pickle::parse(TRY(archive.read(*entry, max_pickle_bytes)), place + ": " + printable(entry->name))));
  const std::string data = prefix + "data/";
  out.storage_text_ = "member '" + printable(data);
  for (const zip::Entry& e : archive.entries())
    if (e.name.starts_with(data)) out.storages_.emplace(e.name.substr(data.size()), Storage{e.offset, e.size, e.crc});
  if (const zip::Entry* order = archive.find(prefix + "byteorder"); order != nullptr) {
    const std::string text = TRY(archive.read(*order, kMaxByteorderBytes));
    if (text != "little" && text != "big")
      return corrupt(place + ": byteorder: expected little or big, got '" + printable(text) + "'");
    out.big_endian_ = text == "big";
  }
  return out;
}

Result<TorchFile> TorchFile::open_stream(const File& file, Index offset, Index length, Index max_pickle_bytes) {
  constexpr Index kMaxSmall = Index{1} << 20;  // limit for the pickles before and after the object
  const std::string place = at(file.path(), offset);
  PickleStream stream(file, offset, length);
  TRY(stream.next("magic number", kMaxSmall));
  const pickle::Document protocol = TRY(stream.next("protocol", kMaxSmall));
  if (protocol.root().as_int() != kStreamProtocol)
    return protocol.root().mismatch("protocol", std::to_string(kStreamProtocol));
  TRY(check_sys_info(TRY(stream.next("sys_info", kMaxSmall)).root()));
  TorchFile out(place, TRY(stream.next("object", max_pickle_bytes)));
  const pickle::Document keys = TRY(stream.next("storage keys", max_pickle_bytes));
  if (keys.root().kind() != Kind::kList) return keys.root().mismatch("storage keys", "a list");

  const auto references = TRY(references_of(out.root(), place));
  out.storage_text_ = "storage '";
  Index position = stream.position();
  for (std::size_t i = 0; i < keys.root().size(); ++i) {
    const std::optional<std::string_view> key = keys.root()[i].as_string();
    if (!key) return keys.root()[i].mismatch("storage key", "a string");
    const std::string name = "storage '" + printable(*key) + "'";
    const auto reference = references.find(std::string(*key));
    if (reference == references.end())
      return unsupported(place + ": " + name +
                         ": no tensor refers to it, so the size of its elements, and where the next "
                         "storage begins, are unknown; load the file with torch.load and save it again");
    std::array<std::byte, 8> buffer;
    if (!fits_inside(position, std::ssize(buffer), length))
      return corrupt(at(file.path(), offset + position) + ": " + name + ": expected its size in 8 bytes, got " +
                     std::to_string(length - position) + " before the end");
    TRY(file.read_at(offset + position, buffer));
    const auto count = to_index(TRY(Cursor(buffer, file.path(), offset + position).read<std::uint64_t>("size")));
    const auto bytes = count ? checked_mul(*count, reference->second.width()) : std::nullopt;
    position += std::ssize(buffer);
    if (!bytes || !fits_inside(position, *bytes, length))
      return corrupt(at(file.path(), offset + position) + ": " + name + ": expected " +
                     (bytes ? bytes_of(*bytes) : "a size that fits 63 bits") + ", got " +
                     std::to_string(length - position) + " before the end");
    if (!out.storages_.emplace(std::string(*key), Storage{offset + position, *bytes, std::nullopt}).second)
      return corrupt(at(file.path(), offset + position) + ": " + name + ": comes twice");
    position += *bytes;
  }
  if (position != length)
    return corrupt(at(file.path(), offset + position) + ": expected the end, got " + std::to_string(length - position) +
                   " more bytes");
  return out;
}

Result<StoredTensor> TorchFile::resolve(Value value) const {
  const Rebuild call = TRY(unwrap(value, place_));
  const bool v1 = call.callee.is_global("torch._utils", "_rebuild_tensor");  // before torch 0.4
  const bool v2 = call.callee.is_global("torch._utils", "_rebuild_tensor_v2");
  const bool v3 = call.callee.is_global("torch._utils", "_rebuild_tensor_v3");
  if (!v1 && !v2 && !v3)
    return unsupported(place_ + ": tensor: made by " + pickle::print(call.callee) + ": " +
                       std::string(explanation(call.callee.name())));
  const Value args = call.args;
  const std::size_t fixed = v1 ? 4 : v2 ? 6 : 7;
  const std::size_t most = v1 ? fixed : fixed + 1;
  if (args.size() < fixed || args.size() > most)
    return args.mismatch("tensor arguments",
                         v1 ? "4 of them" : std::to_string(fixed) + " or " + std::to_string(most) + " of them");
  if (args.size() > fixed) TRY(refuse_lazy_math(args[fixed], place_));

  StoredTensor out;
  const Reference storage = TRY(read_reference(args[0], place_));
  if (v3) {
    const Value type = args[6];
    if (type.kind() != Kind::kGlobal) return type.mismatch("tensor dtype", "a torch dtype");
    const auto dtype = type.module() == "torch" ? dtype_from_torch(type.name()) : std::nullopt;
    if (!dtype) return unsupported(place_ + ": tensor: dtype " + pickle::print(type) + " is not supported");
    if (storage.dtype) return args[0].persistent_id()[1].mismatch("storage type", "torch.storage.UntypedStorage");
    out.dtype = *dtype;
  } else {
    if (!storage.dtype) return args[0].persistent_id()[1].mismatch("storage type", "a class with a dtype");
    out.dtype = *storage.dtype;
  }
  const auto stored = storages_.find(storage.key);
  const auto name = [&] { return storage_text_ + printable(storage.key) + "'"; };
  if (stored == storages_.end()) return corrupt(place_ + ": torch archive: no " + name());
  if (stored->second.length != storage.bytes)
    return corrupt(place_ + ": " + name() + ": expected " + bytes_of(storage.bytes) + ", got " +
                   std::to_string(stored->second.length));

  out.box = whole(TRY(read_dims(args[2], "tensor size")));
  out.strides = TRY(read_dims(args[3], "tensor stride"));
  if (out.strides.rank() != out.shape().rank())
    return args[3].mismatch("tensor stride", std::to_string(out.shape().rank()) + " numbers");
  const std::optional<Index> start = checked_mul(TRY(read_count(args[1], "storage offset")), byte_size(out.dtype));
  const std::optional<Index> sum = start ? checked_add(*start, storage.start_bytes) : std::nullopt;
  if (!sum) return args[1].mismatch("storage offset", "an offset that fits 63 bits");
  out.start = *sum;
  out.extent.offset = stored->second.offset;
  out.extent.length = stored->second.length;
  out.crc = stored->second.crc;
  out.big_endian = big_endian_;
  TRY(check_reach(out, place_));
  if (call.declared) TRY(check_declared(*call.declared, out, place_));
  return out;
}

}  // namespace reshard
