#include "formats/encoding/torch_archive.h"

#include <utility>

#include "formats/encoding/pickle_writer.h"
#include "lib/base/text.h"

namespace reshard::torch_archive {
namespace {

using pickle::Kind;
using pickle::Value;

constexpr std::string_view kPrefix = "archive/";
constexpr Index kMaxByteorderBytes = 16;

// An open archive and the directory its members are in, which the first of them names.
struct Item {
  zip::Archive archive;
  std::string prefix;
  std::string place;  // "path@0x1f40", for messages

  Result<const zip::Entry*> member(std::string_view name) const {
    const zip::Entry* entry = archive.find(prefix + std::string(name));
    if (entry == nullptr)
      return corrupt(place + ": torch archive: no member '" + printable(prefix + std::string(name)) + "'");
    return entry;
  }
};

Result<Item> open_item(const File& file, Index offset, Index length) {
  zip::Archive archive = TRY(zip::Archive::open(file, offset, length));
  const std::string place = at(file.path(), offset);
  if (archive.entries().empty()) return corrupt(place + ": torch archive: no members");
  const std::string& first = archive.entries().front().name;
  const std::size_t slash = first.find('/');
  if (slash == std::string::npos)
    return corrupt(place + ": torch archive: expected members in a directory, got '" + printable(first) + "'");
  std::string prefix = first.substr(0, slash + 1);
  for (const zip::Entry& e : archive.entries())
    if (!e.name.starts_with(prefix))
      return corrupt(place + ": torch archive: expected members in '" + printable(prefix) + "', got '" +
                     printable(e.name) + "'");
  return Item{std::move(archive), std::move(prefix), place};
}

Result<pickle::Document> read_pickle(const Item& item, Index limit) {
  const zip::Entry* entry = TRY(item.member("data.pkl"));
  return pickle::parse(TRY(item.archive.read(*entry, limit)), item.place + ": " + entry->name);
}

Result<bool> is_big_endian(const Item& item) {
  const zip::Entry* entry = item.archive.find(item.prefix + "byteorder");
  if (entry == nullptr) return false;
  const std::string order = TRY(item.archive.read(*entry, kMaxByteorderBytes));
  if (order != "little" && order != "big")
    return corrupt(item.place + ": byteorder: expected little or big, got '" + printable(order) + "'");
  return order == "big";
}

Result<Dims> read_dims(Value v, std::string_view what) {
  if (v.kind() != Kind::kTuple) return v.mismatch(what, "a tuple");
  if (v.size() > static_cast<std::size_t>(kMaxRank))
    return v.mismatch(what, "at most " + std::to_string(kMaxRank) + " dimensions");
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

// The call that makes the tensor, under the wrappers that a Parameter or a tensor with attributes has.
struct Rebuild {
  Value callee;
  Value args;
};

Result<Rebuild> unwrap(Value root, std::string_view place) {
  if (root.kind() != Kind::kObject) return root.mismatch("tensor", "a tensor");
  Rebuild r{root.callee(), root.args()};
  // Wrappers nest two deep at most: a Parameter of a tensor with attributes.
  for (int depth = 0; depth < 4; ++depth) {
    const std::string name(r.callee.name());
    if (r.callee.is_global("torch._utils", "_rebuild_parameter") ||
        r.callee.is_global("torch._utils", "_rebuild_parameter_with_state")) {
      if (r.args.size() < 1 || r.args[0].kind() != Kind::kObject)
        return r.args.mismatch(name, "a tensor as first argument");
      r = {r.args[0].callee(), r.args[0].args()};
    } else if (r.callee.is_global("torch._tensor", "_rebuild_from_type_v2")) {
      if (r.args.size() < 3 || r.args[2].kind() != Kind::kTuple)
        return r.args.mismatch(name, "(function, type, arguments, state)");
      r = {r.args[0], r.args[2]};
    } else {
      return r;
    }
  }
  return unsupported(std::string(place) + ": tensor: wrapped more than 4 times");
}

// conj and neg are marks that the stored elements still have to be conjugated or negated.
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

struct Storage {
  std::string key;
  DType dtype;
  Index bytes = 0;
};

Result<Storage> read_storage(Value reference, const std::optional<DType>& dtype, std::string_view place) {
  const Value id = reference.persistent_id();
  if (id.kind() != Kind::kTuple || id.size() != 5 || id[0].as_string() != "storage")
    return id.mismatch("storage", "('storage', type, key, location, size)");
  const Value type = id[1];
  const std::optional<std::string_view> key = id[2].as_string();
  if (!key) return id[2].mismatch("storage key", "a string");
  const Index count = TRY(read_count(id[4], "storage size"));
  if (dtype) {
    if (!type.is_global("torch.storage", "UntypedStorage"))
      return type.mismatch("storage type", "torch.storage.UntypedStorage");
    return Storage{std::string(*key), *dtype, count};
  }
  if (type.kind() != Kind::kGlobal) return type.mismatch("storage type", "a class");
  const std::optional<DType> own = type.module() == "torch" ? dtype_from_storage_class(type.name()) : std::nullopt;
  if (!own)
    return unsupported(std::string(place) + ": tensor: storage type " + pickle::print(type) + " is not supported");
  const std::optional<Index> bytes = checked_mul(count, byte_size(*own));
  if (!bytes) return id[4].mismatch("storage size", "a size that fits 63 bits");
  return Storage{std::string(*key), *own, *bytes};
}

// Bytes from the storage's first to behind the last that the strides reach; nothing on overflow.
std::optional<Index> reach(const StoredTensor& t) {
  Index last = 0;
  for (int d = 0; d < t.shape.rank(); ++d) {
    const std::optional<Index> step = checked_mul(t.shape[d] - 1, t.strides[d]);
    const std::optional<Index> sum = step ? checked_add(last, *step) : std::nullopt;
    if (!sum) return std::nullopt;
    last = *sum;
  }
  const std::optional<Index> end = checked_add(last, 1);
  const std::optional<Index> bytes = end ? checked_mul(*end, byte_size(t.dtype)) : std::nullopt;
  return bytes ? checked_add(t.start_bytes, *bytes) : std::nullopt;
}

Status check_reach(const StoredTensor& t, std::string_view place) {
  const std::optional<Index> elements = checked_volume(t.shape);
  if (!elements || !checked_mul(*elements, byte_size(t.dtype)))
    return corrupt(std::string(place) + ": tensor: shape " + to_string(t.shape) + " has more than 2^63 bytes");
  if (*elements == 0) return {};
  const std::optional<Index> end = reach(t);
  if (!end || *end > t.payload_length)
    return corrupt(std::string(place) + ": tensor: shape " + to_string(t.shape) + " with strides " +
                   to_string(t.strides) + " from byte " + std::to_string(t.start_bytes) +
                   " on: expected to stay inside the storage of " + std::to_string(t.payload_length) + " bytes, got " +
                   (end ? std::to_string(*end) : "an overflow"));
  return {};
}

// Pushes what torch.save writes for a contiguous tensor that is all of storage `key`.
void append_tensor(pickle::PickleWriter& w, DType dtype, const Dims& shape, std::string_view key) {
  const DTypeInfo& type = info(dtype);
  const bool typed = !type.storage_class.empty();
  w.global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  w.mark();
  w.mark();
  w.text("storage");
  if (typed) {
    w.global("torch", type.storage_class);
  } else {
    w.global("torch.storage", "UntypedStorage");
  }
  w.text(key);
  w.text("cpu");
  w.integer(typed ? volume(shape) : volume(shape) * type.bytes);
  w.tuple_from_mark();
  w.persistent_id();
  w.integer(0);  // storage_offset
  w.integers(shape.span());
  w.integers(row_major_strides(shape).span());
  w.boolean(false);  // requires_grad
  w.global("collections", "OrderedDict");
  w.empty_tuple();
  w.reduce();  // backward_hooks
  if (!typed) w.global("torch", type.torch_name);
  w.tuple_from_mark();
  w.reduce();
}

// data.pkl of an item of ours.
std::string tensor_pickle(DType dtype, const Dims& shape) {
  pickle::PickleWriter w;
  append_tensor(w, dtype, shape, "0");
  return std::move(w).finish();
}

// data.pkl of a file of ours: a dict of tensors, storage i being that of the i-th.
std::string dict_pickle(std::span<const NamedTensor> tensors) {
  pickle::PickleWriter w;
  w.empty_dict();
  pickle::ElementRuns entries(w, &pickle::PickleWriter::set_items);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    entries.next();
    w.text(tensors[i].name);
    append_tensor(w, tensors[i].dtype, tensors[i].shape, std::to_string(i));
  }
  entries.end();
  return std::move(w).finish();
}

void add_common_members(zip::Builder& builder, std::string_view data_pickle) {
  const std::string prefix(kPrefix);
  builder.add(prefix + "data.pkl", data_pickle);
  builder.add(prefix + "byteorder", "little");
  builder.add(prefix + "version", "3\n");
}

// The payload comes last, so that only the end records can be beyond 4 GiB.
zip::Builder::Around around_tensor(DType dtype, const Dims& shape, Index file_offset, std::uint32_t crc) {
  zip::Builder builder(file_offset);
  add_common_members(builder, tensor_pickle(dtype, shape));
  builder.add_hole(std::string(kPrefix) + "data/0", volume(shape) * byte_size(dtype), crc, kAlignment);
  return std::move(builder).finish();
}

}  // namespace

Result<StoredTensor> read_tensor_item(const File& file, Index offset, Index length) {
  const Item item = TRY(open_item(file, offset, length));
  const pickle::Document document = TRY(read_pickle(item, kMaxTensorPickleBytes));
  const Rebuild call = TRY(unwrap(document.root(), item.place));
  const bool v2 = call.callee.is_global("torch._utils", "_rebuild_tensor_v2");
  const bool v3 = call.callee.is_global("torch._utils", "_rebuild_tensor_v3");
  if (!v2 && !v3)
    return unsupported(item.place + ": tensor: made by " + pickle::print(call.callee) +
                       "; only plain strided tensors (_rebuild_tensor_v2 and _v3) are supported");
  const Value args = call.args;
  const std::size_t fixed = v2 ? 6 : 7;
  if (args.size() < fixed || args.size() > fixed + 1)
    return args.mismatch("tensor arguments", std::to_string(fixed) + " or " + std::to_string(fixed + 1) + " of them");
  if (args.size() > fixed) TRY(refuse_lazy_math(args[fixed], item.place));

  std::optional<DType> dtype;
  if (v3) {
    const Value type = args[6];
    if (type.kind() != Kind::kGlobal) return type.mismatch("tensor dtype", "a torch dtype");
    dtype = type.module() == "torch" ? dtype_from_torch(type.name()) : std::nullopt;
    if (!dtype) return unsupported(item.place + ": tensor: dtype " + pickle::print(type) + " is not supported");
  }
  const Storage storage = TRY(read_storage(args[0], dtype, item.place));
  const zip::Entry* payload = TRY(item.member("data/" + storage.key));
  if (payload->size != storage.bytes)
    return corrupt(item.place + ": member '" + printable(payload->name) + "': expected " +
                   std::to_string(storage.bytes) + " bytes, got " + std::to_string(payload->size));

  StoredTensor out;
  out.dtype = storage.dtype;
  out.shape = TRY(read_dims(args[2], "tensor size"));
  out.strides = TRY(read_dims(args[3], "tensor stride"));
  if (out.strides.rank() != out.shape.rank())
    return args[3].mismatch("tensor stride", std::to_string(out.shape.rank()) + " numbers");
  const std::optional<Index> start = checked_mul(TRY(read_count(args[1], "storage offset")), byte_size(out.dtype));
  if (!start) return args[1].mismatch("storage offset", "an offset that fits 63 bits");
  out.start_bytes = *start;
  out.payload_offset = payload->offset;
  out.payload_length = payload->size;
  out.crc = payload->crc;
  out.big_endian = TRY(is_big_endian(item));
  TRY(check_reach(out, item.place));
  return out;
}

Result<pickle::Document> read_object_item(const File& file, Index offset, Index length) {
  return read_pickle(TRY(open_item(file, offset, length)), kMaxObjectPickleBytes);
}

Status check_item(const File& file, Index offset, Index length) {
  const Item item = TRY(open_item(file, offset, length));
  TRY(item.member("data.pkl"));
  for (const zip::Entry& entry : item.archive.entries()) TRY(item.archive.read(entry, length));
  return {};
}

ItemShape item_shape(DType dtype, const Dims& shape, Index file_offset) {
  const zip::Builder::Around around = around_tensor(dtype, shape, file_offset, 0);
  return {static_cast<Index>(around.before.size()), volume(shape) * byte_size(dtype),
          static_cast<Index>(around.after.front().size())};
}

std::string item_header(DType dtype, const Dims& shape, Index file_offset, std::uint32_t crc) {
  return around_tensor(dtype, shape, file_offset, crc).before;
}

std::string item_trailer(DType dtype, const Dims& shape, Index file_offset, std::uint32_t crc) {
  return around_tensor(dtype, shape, file_offset, crc).after.front();
}

zip::Builder::Around around_tensors(std::span<const NamedTensor> tensors) {
  zip::Builder builder(0);
  add_common_members(builder, dict_pickle(tensors));
  for (std::size_t i = 0; i < tensors.size(); ++i)
    builder.add_hole(std::string(kPrefix) + "data/" + std::to_string(i),
                     volume(tensors[i].shape) * byte_size(tensors[i].dtype), tensors[i].crc, kAlignment);
  return std::move(builder).finish();
}

std::string object_item(std::string_view pickle_bytes) {
  zip::Builder builder(0);
  add_common_members(builder, pickle_bytes);
  return std::move(builder).finish().before;
}

}  // namespace reshard::torch_archive
