// SPDX-License-Identifier: Apache-2.0
#include "formats/encoding/tensor_file.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

using pickle::Kind;
using pickle::Value;

constexpr Index kMaxObjectBytes = Index{64} << 20;  // limit for a pickle in a safetensors file
constexpr std::string_view kNonTensorKeys = "non_tensor_keys";
constexpr std::string_view kRootName = "value";
// The limit for visited values, as a container that is referenced twice is visited twice. A file that shares containers
// so often was not written by a trainer.
constexpr Index kVisitsPerCell = 8;
constexpr Index kFreeVisits = 4096;
// The limit for all names and paths together: a container's name is part of the names of everything below it.
constexpr Index kMaxNameBytes = Index{512} << 20;
constexpr Index kNameBytesPerByte = 64;  // for each byte of the pickle
constexpr Index kFreeNameBytes = Index{4} << 20;

// Flattens a value. The depth limit also ends the walk through a container that contains itself.
class Walk {
 public:
  Walk(const TorchFile& file, TensorFile::Parts parts, std::vector<TensorFile::Entry>& tensors,
       std::vector<TensorFile::Object>& objects)
      : file_(file),
        distributed_(file),
        parts_(parts),
        tensors_(tensors),
        objects_(objects),
        visits_left_(kVisitsPerCell * file.document().cells() + kFreeVisits),
        most_name_bytes_(
            std::min(kMaxNameBytes, kNameBytesPerByte * std::ssize(file.document().bytes()) + kFreeNameBytes)) {}

  Status run() {
    if (is_flattened(file_.root(), 0)) return visit(file_.root());
    path_.emplace_back(std::string(kRootName));
    return visit(file_.root());
  }

 private:
  Error too_much(std::string_view what) const {
    return unsupported(file_.place() + ": " + printable(dotted_name(path_).substr(0, 200)) + ": " + std::string(what));
  }

  // Returns whether a value is flattened: dicts, and sequences that contain a tensor or a dict at any depth.
  bool is_flattened(Value v, int depth) {
    if (v.kind() == Kind::kDict) return true;
    if (!v.is_sequence() || v.size() == 0) return false;
    if (depth > TensorFile::kMaxDepth) return true;  // the walk reports it
    const auto [it, is_new] = apart_.try_emplace(v.identity(), false);
    if (!is_new) return it->second;
    bool found = false;
    for (std::size_t i = 0; i < v.size() && !found; ++i)
      found = makes_torch_tensor(v[i]) || is_flattened(v[i], depth + 1);
    return apart_[v.identity()] = found;
  }

  Status visit(Value v) {
    if (--visits_left_ < 0) return too_much("containers that are shared too often or contain each other");
    if (makes_distributed_tensor(v)) return visit_distributed(v);
    if (makes_torch_tensor(v)) {
      auto tensor = file_.resolve(v);
      std::optional<Error> refusal;
      if (!tensor) {
        refusal = std::move(tensor).context(tensor_text(dotted_name(path_))).error();
        const auto computed = parts_ == TensorFile::Parts::kDefer && refusal->code() == ErrorCode::kUnsupported
                                  ? computed_tensor(v)
                                  : std::nullopt;
        if (!computed) return *std::move(refusal);
        tensor = *computed;
      }
      tensors_.push_back({TRY(charged_name()), path_, *std::move(tensor), std::nullopt, std::move(refusal)});
      return {};
    }
    if (!is_flattened(v, 0) || (v.size() == 0 && !path_.empty())) {
      objects_.push_back({TRY(charged_name()), path_, v});
      return {};
    }
    if (path_.size() >= static_cast<std::size_t>(TensorFile::kMaxDepth))
      return too_much("containers nested deeper than " + std::to_string(TensorFile::kMaxDepth) +
                      " levels, or in themselves");
    for (std::size_t i = 0; i < v.size(); ++i) {
      if (v.kind() == Kind::kDict) {
        path_.emplace_back(key_text(v.key(i)));
        TRY(visit(v.value(i)));
      } else {
        path_.emplace_back(static_cast<Index>(i));
        TRY(visit(v[i]));
      }
      path_.pop_back();
    }
    return {};
  }

  Status visit_distributed(Value v) {
    auto resolved = distributed_.resolve(v);
    if (!resolved) return std::move(resolved).context(tensor_text(dotted_name(path_))).error();
    DistributedTensor& tensor = *resolved;
    if (parts_ == TensorFile::Parts::kRead) {
      tensors_.push_back({TRY(charged_name()), path_, {}, std::move(tensor)});
      return {};
    }
    if (!tensor.is_whole()) {
      std::vector<std::string> here;
      for (const StoredTensor& part : tensor.parts) here.push_back(to_string(part.box));
      return unsupported(file_.place() + ": " + tensor_text(dotted_name(path_)) + ": the file contains " +
                         (here.empty() ? "nothing" : join(here, ", ")) + " of " + to_string(tensor.shape) +
                         ", the part of one rank (" + tensor.layout() +
                         "): the rest is in the files of the other ranks. Open the directory of them all, or save "
                         "full_tensor()");
    }
    tensors_.push_back({TRY(charged_name()), path_, std::move(tensor.parts.front())});
    return {};
  }

  // Returns a key as Python's str() does.
  static std::string key_text(Value key) {
    if (const auto text = key.as_string()) return std::string(*text);
    return pickle::print(key, 2, 8);
  }

  Result<std::string> charged_name() {
    std::string out = dotted_name(path_);
    names_bytes_ += 2 * out.size() + path_.size() * sizeof(KeyPath::value_type);
    if (names_bytes_ > most_name_bytes_)
      return too_much("names of more than " + human_bytes(most_name_bytes_) +
                      " in all, which is out of proportion to " + "the pickle: long ones are used too often");
    return out;
  }

  const TorchFile& file_;
  DistributedTensors distributed_;
  TensorFile::Parts parts_;
  std::vector<TensorFile::Entry>& tensors_;
  std::vector<TensorFile::Object>& objects_;
  KeyPath path_;
  Index visits_left_;
  Index most_name_bytes_, names_bytes_ = 0;
  std::unordered_map<std::uint32_t, bool> apart_;  // whether a sequence is flattened, by identity
};

// Parses __metadata__.non_tensor_keys.
Result<std::unordered_set<std::string>> non_tensor_keys(const SafetensorsMetadata& metadata, const std::string& path) {
  std::unordered_set<std::string> out;
  for (const auto& [key, value] : metadata) {
    if (key != kNonTensorKeys) continue;
    const std::string where = path + ": " + std::string(kNonTensorKeys);
    const Json json = TRY(parse_json(value, where));
    for (const Json& item : TRY(json.as_array().context(where)))
      out.insert(std::string(TRY(item.as_string().context(where))));
  }
  return out;
}

// Reads an object that is pickled and stored as a tensor of bytes.
Result<pickle::Document> read_object(const File& file, const SafetensorsEntry& entry) {
  const std::string where = at(file.path(), entry.offset) + ": object '" + printable(entry.name) + "'";
  if (entry.dtype != DType::kUint8 || entry.shape.rank() != 1)
    return corrupt(where + ": expected a vector of U8, got " + std::string(info(entry.dtype).safetensors_name) + " " +
                   to_string(entry.shape));
  if (entry.length > kMaxObjectBytes)
    return unsupported(where + ": expected at most " + with_commas(kMaxObjectBytes) + " bytes, got " +
                       with_commas(entry.length));
  std::string bytes(entry.length, '\0');
  TRY(file.read_at(entry.offset, std::as_writable_bytes(std::span(bytes))));
  return pickle::parse(std::move(bytes), where);
}

// Returns whether an entry may be a pickle that is not listed: its name is "state.3.step" or "param_groups", its
// elements are bytes, and it begins and ends like a pickle.
bool looks_pickled(const File& file, const SafetensorsEntry& entry) {
  constexpr std::string_view kState = "state.";
  const bool is_state = entry.name.starts_with(kState) && entry.name.size() > kState.size() &&
                        entry.name[kState.size()] >= '0' && entry.name[kState.size()] <= '9';
  if ((!is_state && entry.name != "param_groups") || entry.dtype != DType::kUint8 || entry.shape.rank() != 1 ||
      entry.length < 4 || entry.length > kMaxObjectBytes)
    return false;
  std::array<char, 3> ends = {};
  const auto bytes = std::as_writable_bytes(std::span(ends));
  return file.read_at(entry.offset, bytes.first(2)) && file.read_at(entry.offset + entry.length - 1, bytes.last(1)) &&
         ends[0] == '\x80' && ends[1] >= 2 && ends[1] <= 5 && ends[2] == '.';
}

}  // namespace

Result<TensorFile> TensorFile::open(const File& file, SafetensorsEnd end, Parts parts) {
  const Index size = TRY(file.size());
  std::string head(std::min(size, TorchFile::kHeadBytes), '\0');
  TRY(file.read_at(0, std::as_writable_bytes(std::span(head))));
  TensorFile out;
  out.is_torch_ = TorchFile::recognises(head);
  if (out.is_torch_) {
    TorchFile torch = TRY(TorchFile::open(file, 0, size));
    TRY(out.add_torch(torch, parts));
    out.documents_.push_back(std::move(torch).take_document());
  } else {
    TRY(out.add_safetensors(file, end));
  }
  TRY(out.check_names(file.path()));
  return out;
}

std::optional<Value> TensorFile::root() const {
  if (!is_torch_) return std::nullopt;
  return documents_.front().root();
}

Status TensorFile::add_torch(const TorchFile& file, Parts parts) { return Walk(file, parts, tensors_, objects_).run(); }

Status TensorFile::add_safetensors(const File& file, SafetensorsEnd end) {
  SafetensorsHeader header = TRY(read_safetensors_header(file, end));
  metadata_ = std::move(header.metadata);
  auto keys = TRY(non_tensor_keys(metadata_, file.path()));
  const bool is_listed = !keys.empty();
  for (SafetensorsEntry& entry : header.entries) {
    KeyPath path = {entry.name};
    if (keys.erase(entry.name) > 0) {
      documents_.push_back(TRY(read_object(file, entry)));
      objects_.push_back({entry.name, std::move(path), documents_.back().root()});
      continue;
    }
    if (!is_listed && looks_pickled(file, entry)) {
      if (auto object = read_object(file, entry)) {
        documents_.push_back(*std::move(object));
        objects_.push_back({entry.name, std::move(path), documents_.back().root()});
        continue;
      }
    }
    StoredTensor tensor;
    tensor.dtype = entry.dtype;
    tensor.box = whole(entry.shape);
    tensor.strides = row_major_strides(entry.shape);
    tensor.extent = {0, entry.offset, entry.length};
    tensors_.push_back({std::move(entry.name), std::move(path), tensor});
  }
  if (!keys.empty())
    return corrupt(file.path() + ": " + std::string(kNonTensorKeys) + ": expected entries of this file, got '" +
                   printable(*std::min_element(keys.begin(), keys.end())) + "'");
  return {};
}

Status TensorFile::check_names(const std::string& path) const {
  std::unordered_set<std::string_view> names;
  const auto twice = [&](std::string_view name) {
    return corrupt(path + ": '" + printable(name) + "': the name occurs twice");
  };
  for (const Entry& e : tensors_)
    if (!names.insert(e.name).second) return twice(e.name);
  for (const Object& o : objects_)
    if (!names.insert(o.name).second) return twice(o.name);
  return {};
}

}  // namespace reshard
