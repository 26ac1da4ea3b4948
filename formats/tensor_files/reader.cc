// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr int kMaxJsonDepth = 64;

Status write_json(pickle::PickleWriter& w, const Json& value, int depth) {
  if (depth > kMaxJsonDepth) return unsupported("JSON nested deeper than " + std::to_string(kMaxJsonDepth) + " levels");
  if (value.is_null()) {
    w.none();
  } else if (value.is_bool()) {
    w.boolean(TRY(value.as_bool()));
  } else if (value.is_integer()) {
    w.integer(TRY(value.as_index()));
  } else if (value.is_number()) {
    w.number(TRY(value.as_double()));
  } else if (value.is_string()) {
    w.text(TRY(value.as_string()));
  } else if (value.is_array()) {
    w.empty_list();
    pickle::ElementRuns runs(w, &pickle::PickleWriter::append_items);
    for (const Json& item : TRY(value.as_array())) {
      runs.next();
      TRY(write_json(w, item, depth + 1));
    }
    runs.end();
  } else {
    w.empty_dict();
    pickle::ElementRuns runs(w, &pickle::PickleWriter::set_items);
    for (const Json::Member& member : TRY(value.as_object())) {
      runs.next();
      w.text(member.key);
      TRY(write_json(w, member.value, depth + 1));
    }
    runs.end();
  }
  return {};
}

}  // namespace

std::string files_text(const std::vector<std::string>& first, Index count) {
  std::vector<std::string> quoted;
  for (const std::string& name : first) quoted.push_back("'" + printable(name) + "'");
  const Index more = count - std::ssize(first);
  return count_of(count, "file") + " (" + join(quoted, ", ") + (more > 0 ? " and " + with_commas(more) + " more" : "") +
         ")";
}

Result<TensorFileReader::OpenFile> TensorFileReader::open_file(const std::string& name, const OpenOptions& options,
                                                               TensorFile::Parts parts) {
  tried_.insert(name);
  const auto file = TRY(files_.open(path_join(catalog_.root, name)));
  auto content = std::make_unique<const TensorFile>(
      TRY(TensorFile::open(*file, options.files_too ? SafetensorsEnd::kExact : SafetensorsEnd::kUnchecked, parts)));
  const Index size = TRY(file->size());
  catalog_.files.push_back({name, size});
  open_.push_back(std::move(content));
  return OpenFile{static_cast<std::uint32_t>(catalog_.files.size() - 1), open_.back().get()};
}

Result<std::optional<TensorFileReader::OpenFile>> TensorFileReader::open_if_whole(const std::string& name,
                                                                                  const OpenOptions& options,
                                                                                  TensorFile::Parts parts) {
  const IoFailureWatch watch;
  auto open = open_file(name, options, parts);
  if (open) return std::optional(*open);
  TRY(leave_out(watch, open.error()));
  return std::optional<OpenFile>();
}

Status TensorFileReader::find_more_damaged(const std::vector<std::string>& names) {
  std::vector<std::string> rest;
  for (const std::string& name : names)
    if (is_partial() && !tried_.contains(name)) rest.push_back(name);
  TRY(read_files<bool>(rest, [](const File& file, std::uint32_t) -> Result<bool> {
    TRY(TensorFile::open(file));
    return true;
  }));
  return {};
}

bool TensorFileReader::is_of_file(const Error& error, const IoFailureWatch& watch) {
  const ErrorCode code = error.code();
  const bool is_known = code == ErrorCode::kCorrupt || code == ErrorCode::kUnsupported || code == ErrorCode::kIo;
  return is_known && !watch.may_be_io_failure(error);
}

Status TensorFileReader::leave_out(const IoFailureWatch& watch, const Error& error, std::vector<std::string> tensors) {
  if (!is_of_file(error, watch)) return error;
  catalog_.unread_files.push_back({error, std::move(tensors), watch.may_be_io_failure_or_denial(error)});
  return {};
}

void TensorFileReader::leave_out_tensor(const std::string& name) {
  for (UnreadFile& file : catalog_.unread_files) file.tensors.push_back(name);
}

// If these files together have all of the tensors, returns one that has the first; otherwise nothing.
std::string TensorFileReader::file_with(const std::vector<std::string>& tensors,
                                        const std::vector<std::string>& files) {
  std::string first;
  std::set<std::string_view> wanted(tensors.begin(), tensors.end());
  for (const std::string& name : files) {
    const auto file = files_.open(path_join(catalog_.root, name));
    if (!file) continue;
    const auto content = TensorFile::open(**file, SafetensorsEnd::kUnchecked, TensorFile::Parts::kDefer);
    if (!content) continue;
    for (const TensorFile::Entry& e : content->tensors())
      if (wanted.erase(e.name) > 0 && e.name == tensors.front()) first = name;
  }
  return wanted.empty() ? first : std::string();
}

Status TensorFileReader::check_index(const IndexedFiles& index, const std::vector<std::string>& unnamed) {
  index.describe(catalog_);
  for (UnreadFile& unread : catalog_.unread_files) {
    if (unread.tensors.empty() || TRY(path_exists(path_join(catalog_.root, index.file_of(unread.tensors.front())))))
      continue;
    const std::string named = index.other_file(unread.tensors);
    const std::string other = named.empty() ? file_with(unread.tensors, unnamed) : "";
    if (!named.empty())
      unread.why = Error(unread.why.code(), unread.why.message() + "; its tensors are in " + printable(named) +
                                                ": correct the index, or save the model again");
    else if (!other.empty())
      unread.why = Error(unread.why.code(), unread.why.message() + "; " + printable(other) +
                                                ", which the index does not name, has its tensors: correct the index "
                                                "if that file is of the same save");
    unread.is_index_wrong = !named.empty();
  }
  for (const auto& [file, tensors] : index.absent()) {
    const std::string other = index.other_file(tensors);
    const Error why = corrupt(
        path_join(catalog_.root, file) + ": expected " + tensor_text(tensors.front()) + ", as " + index.index().path() +
        " says; it is missing (" + count_of(std::ssize(tensors), "such tensor") + ")" +
        (other.empty() ? "" : "; it is in " + printable(other) + ": correct the index, or save the model again"));
    catalog_.unread_files.push_back({why, tensors, false, !other.empty()});
  }
  return {};
}

Fragment TensorFileReader::in_file(const StoredTensor& stored, std::uint32_t file) {
  Fragment fragment = stored;
  fragment.extent.file = file;
  return fragment;
}

Status TensorFileReader::add_tensor(const std::string& name, KeyPath path, std::uint32_t file,
                                    const StoredTensor& stored) {
  Tensor tensor;
  tensor.name = name;
  tensor.dtype = stored.dtype;
  tensor.shape = stored.shape();
  tensor.path = std::move(path);
  tensor.fragments = FragmentList(tensor.shape.rank());
  tensor.fragments.add(in_file(stored, file));
  return catalog_.add(std::move(tensor)).context(catalog_.file_path(file));
}

Status TensorFileReader::add_object(const std::string& name, KeyPath path, std::uint32_t file, pickle::Value value) {
  if (catalog_.find(name) || !values_.emplace(name, value).second)
    return corrupt(catalog_.file_path(file) + ": object '" + printable(name) + "': the name occurs twice");
  catalog_.blobs.push_back({name, {file, 0, 0}, std::move(path)});
  return {};
}

Status TensorFileReader::add_json(const std::string& name, KeyPath path, std::uint32_t file, const Json& value) {
  const std::string where = catalog_.file_path(file) + ": " + printable(name);
  pickle::PickleWriter w;
  TRY(write_json(w, value, 0).context(where));
  return add_pickled(name, std::move(path), file, std::move(w).finish());
}

Result<std::string> TensorFileReader::json_item(const Json& value) {
  pickle::PickleWriter w;
  TRY(write_json(w, value, 0));
  return torch_archive::object_item(std::move(w).finish());
}

Status TensorFileReader::add_pickled(const std::string& name, KeyPath path, std::uint32_t file, std::string pickle) {
  documents_.push_back(TRY(pickle::parse(std::move(pickle), catalog_.file_path(file) + ": " + printable(name))));
  return add_object(name, std::move(path), file, documents_.back().root());
}

namespace {

// Returns the items of two JSON lists of strings, each once; nothing if one of the texts is none.
std::optional<std::string> joined_lists(const std::string& a, const std::string& b) {
  Json all = Json::array();
  std::set<std::string> known;
  for (const std::string& text : {a, b}) {
    const auto list = parse_json(text, "");
    if (!list || !list->is_array()) return std::nullopt;
    const auto items = list->as_array();
    for (const Json& item : *items) {
      if (!item.is_string()) return std::nullopt;
      if (known.insert(to_text(item)).second) all.push_back(item);
    }
  }
  return to_text(all);
}

}  // namespace

void TensorFileReader::add_header_metadata(const SafetensorsMetadata& metadata) {
  auto& all = catalog_.header_metadata;
  for (const auto& entry : metadata) {
    const std::string& key = entry.first;
    if (key == "non_tensor_keys" || key.starts_with("DCP_") || disputed_.contains(key)) continue;
    const auto there = std::find_if(all.begin(), all.end(), [&](const auto& e) { return e.first == key; });
    if (there == all.end()) {
      all.push_back(entry);
    } else if (there->second != entry.second) {
      if (auto both = joined_lists(there->second, entry.second)) {
        there->second = *std::move(both);
        continue;
      }
      all.erase(there);
      disputed_.insert(key);
      if (key == "format") continue;  // each output writes its own
      catalog_.notes.push_back("The files' headers (__metadata__) disagree on '" + printable(key) +
                               "', which a copy will not have.");
    }
  }
}

Status TensorFileReader::finish(const OpenOptions& options) {
  catalog_.sort_by_name();
  catalog_.shares_extents = !check_extents_disjoint(catalog_, SharedExtents::kRefused);
  if (!options.validated || is_partial()) return {};
  return validate(catalog_, options.files_too);
}

Result<std::string> TensorFileReader::blob_bytes(const Blob& blob) {
  const auto value = values_.find(blob.name);
  if (value == values_.end()) return internal_error("no object '" + printable(blob.name) + "'");
  pickle::PickleWriter w;
  TRY(pickle::write_value(w, value->second)
          .context(catalog_.file_path(blob.extent.file) + ": object '" + printable(blob.name) + "'"));
  return torch_archive::object_item(std::move(w).finish());
}

std::string TensorFileReader::describe(const Blob& blob) {
  const auto value = values_.find(blob.name);
  return value == values_.end() ? "" : pickle::print(value->second, 2, 4);
}

}  // namespace reshard
