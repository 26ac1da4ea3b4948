// SPDX-License-Identifier: Apache-2.0
#include "lib/checkpoint/provenance.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "lib/base/file.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/checkpoint/state_key.h"

namespace reshard {
namespace {

constexpr Index kFirstRead = Index{64} << 10;  // of a manifest: the part before its tensors is rarely longer
constexpr std::string_view kTensors = "tensors";

// ---- Writing

std::string writer_of(const Catalog& source) {
  for (const std::string_view key : {kMadeFrom, std::string_view("format")})
    for (const auto& [name, value] : source.attributes)
      if (name == key) return value;
  return {};
}

// Records the source reader's name of a parameter if the output's name differs.
void add_key(const std::string& name, const std::string& key, std::map<std::string, std::string>& keys) {
  const StateKey from = split_state_key(name), to = split_state_key(key);
  if (from.parameter.empty() || to.parameter.empty() || from.parameter == to.parameter) return;
  if (is_utf8(from.parameter) && is_utf8(to.parameter)) keys.emplace(from.parameter, to.parameter);
}

// Records models that the reader lists separately; a single model is found by its names.
Json models_of(const Catalog& source, const std::vector<NamedOrigin>& tensors) {
  Json out = Json::array();
  for (const Part& part : source.parts) {
    const auto is_of_it = [&](const NamedOrigin& tensor) { return tensor.first.starts_with(part.prefix); };
    if (!part.is_told || part.kind != StateKind::kModel || !is_utf8(part.prefix) || !is_utf8(part.name)) continue;
    if (std::none_of(tensors.begin(), tensors.end(), is_of_it)) continue;
    out.push_back(Json::object().set("prefix", part.prefix).set("name", part.name));
  }
  return out.size() > 1 ? out : Json::array();
}

// ---- Reading

// What is needed of a manifest. It is written before the tensors.
struct ManifestHead {
  std::optional<Json> provenance, files;
};

// Reads only the head: a large model's manifest has tens of megabytes, and that of a mount is computed.
Result<std::optional<ManifestHead>> read_head(Reader& reader, const std::string& path) {
  JsonLimits limits;
  limits.until = kTensors;
  for (Index length = kFirstRead;; length *= 4) {
    const auto text = TRY(reader.side_file_start(std::string(kManifestFile), length));
    if (!text) return std::optional<ManifestHead>();
    ManifestHead out;
    const Status read = parse_json_members(
        *text, path,
        [&](const std::string& key, Json value) -> Status {
          if (key == kProvenance)
            out.provenance = std::move(value);
          else if (key == "files")
            out.files = std::move(value);
          return {};
        },
        limits);
    if (read) return std::optional(std::move(out));
    if (std::ssize(*text) < length || length > kMaxManifestBytes) return read.error();
  }
}

// Returns the catalog's directory relative to the manifest's, with a slash: Megatron's files are in "iter_0000010/".
// Empty if it is the same.
Result<std::string> directory_below(const Json& files, const Catalog& catalog) {
  const std::string first = catalog.files.empty() ? std::string() : catalog.files.front().path;
  if (files.contains(first)) return std::string();
  const std::span<const Json::Member> members = TRY(files.as_object());
  for (const Json::Member& member : members)
    if (member.key.ends_with("/" + first)) return member.key.substr(0, member.key.size() - first.size());
  return std::string();
}

// Returns whether these files were written with the manifest. A checkpoint that is one file records none.
Result<bool> is_of_these_files(const ManifestHead& head, const Catalog& catalog) {
  if (!head.files) return true;
  const std::string below = TRY(directory_below(*head.files, catalog));
  for (const CatalogFile& file : catalog.files) {
    if (file.size < 0) continue;  // missing; reported elsewhere
    const Json* const size = head.files->find(below + file.path);
    if (!size || TRY(size->as_index()) != file.size) return false;
  }
  return true;
}

// The manifest's provenance after a check of all types.
struct Provenance {
  std::string written_by, delta_of;
  Index vocabulary = 0;
  bool model_names = false, lacks_optimizer = false;
  std::set<std::string, std::less<>> buffers;
  std::map<std::string, std::string, std::less<>> keys;
  std::vector<Part> models;
};

Result<Provenance> parse(const Json& json) {
  Provenance out;
  if (!json.is_object()) return corrupt("expected an object, got " + std::string(json.kind()));
  if (json.contains("written_by")) out.written_by = TRY(json.get_string("written_by"));
  if (json.contains("delta_of")) out.delta_of = TRY(json.get_string("delta_of"));
  if (json.contains("vocabulary")) out.vocabulary = TRY(json.get_index("vocabulary"));
  if (out.vocabulary < 0)
    return corrupt("vocabulary: expected a number of at least 0, got " + std::to_string(out.vocabulary));
  if (json.contains("model_names")) out.model_names = TRY(json.get_bool("model_names"));
  if (json.contains("lacks_optimizer")) out.lacks_optimizer = TRY(json.get_bool("lacks_optimizer"));
  if (json.contains("buffers")) {
    const std::span<const Json> names = TRY(json.get_array("buffers"));
    for (const Json& name : names) out.buffers.emplace(TRY(name.as_string()));
  }
  if (json.contains("keys")) {
    const std::span<const Json::Member> members = TRY(json.get_object("keys"));
    for (const Json::Member& member : members)
      out.keys.emplace(member.key, TRY(member.value.as_string().context(printable(member.key))));
  }
  if (json.contains("models")) {
    const std::span<const Json> models = TRY(json.get_array("models"));
    for (const Json& model : models) {
      const std::string_view prefix = TRY(model.get_string("prefix")), name = TRY(model.get_string("name"));
      out.models.push_back(
          {StateKind::kModel, std::string(prefix), std::string(name), "recorded in " + std::string(kManifestFile)});
    }
  }
  return out;
}

template <class Named>
void rename(Named& named, const Provenance& provenance) {
  const StateKey key = split_state_key(named.name);
  const auto found = provenance.keys.find(key.parameter);
  if (found != provenance.keys.end() && named.plain_key.empty())
    named.plain_key = key.prefix + found->second + key.suffix;
}

void apply(const Provenance& provenance, Catalog& catalog) {
  if (catalog.vocabulary == 0) catalog.vocabulary = provenance.vocabulary;
  catalog.has_model_names = catalog.has_model_names || provenance.model_names;
  catalog.lacks_optimizer = catalog.lacks_optimizer || provenance.lacks_optimizer;
  if (!provenance.delta_of.empty()) {
    catalog.delta_of = provenance.delta_of;
    catalog.attributes.emplace_back("delta", "what changed since " + provenance.delta_of + " (reshard patch)");
  }
  if (!provenance.written_by.empty()) catalog.attributes.emplace_back(kMadeFrom, provenance.written_by);
  if (catalog.parts.empty()) catalog.parts = provenance.models;
  if (provenance.buffers.empty() && provenance.keys.empty()) return;
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i) {
    Tensor& tensor = catalog.tensor(i);
    tensor.is_buffer = tensor.is_buffer || provenance.buffers.contains(tensor.name);
    rename(tensor, provenance);
  }
  for (Blob& blob : catalog.blobs) rename(blob, provenance);
}

}  // namespace

Json provenance_of(const Catalog& source, const std::vector<NamedOrigin>& tensors, const ProvenanceOptions& options) {
  Json buffers = Json::array(), named = Json::object();
  std::map<std::string, std::string> keys;
  for (const auto& [name, tensor] : tensors) {
    if (tensor->is_buffer && is_utf8(name)) buffers.push_back(name);
    if (tensor->is_key_told && options.keeps_names) add_key(name, tensor->key(), keys);
  }
  for (const Blob& blob : source.blobs)
    if (blob.is_key_told && options.keeps_names) add_key(blob.name, blob.key(), keys);
  for (const auto& [name, key] : keys) named.set(name, key);
  Json out = Json::object();
  if (const std::string writer = writer_of(source); !writer.empty()) out.set("written_by", writer);
  if (!options.delta_of.empty()) out.set("delta_of", options.delta_of);
  if (options.vocabulary > 0) out.set("vocabulary", options.vocabulary);
  if (buffers.size() > 0) out.set("buffers", std::move(buffers));
  if (named.size() > 0) out.set("keys", std::move(named));
  if (source.has_model_names && options.model_names) out.set("model_names", true);
  if (Json models = models_of(source, tensors); options.keeps_names && models.size() > 0)
    out.set("models", std::move(models));
  if (source.lacks_optimizer && options.holds_optimizer) out.set("lacks_optimizer", true);
  return out;
}

Status adopt_provenance(Reader& reader) {
  Catalog& catalog = reader.catalog();
  const std::string path = path_join(catalog.root, kManifestFile);
  const auto read = [&]() -> Result<std::optional<Provenance>> {
    const auto head = TRY(read_head(reader, path));
    if (!head || !head->provenance) return std::optional<Provenance>();
    if (!TRY(is_of_these_files(*head, catalog).context(path + ": files"))) {
      catalog.notes.push_back(path + " describes other files, so its provenance is ignored.");
      return std::optional<Provenance>();
    }
    return std::optional(TRY(parse(*head->provenance).context(path + ": " + std::string(kProvenance))));
  };
  const auto provenance = read();
  if (!provenance && provenance.error().code() != ErrorCode::kCorrupt) return provenance.error();
  if (!provenance)
    catalog.warnings.push_back("The recorded provenance is ignored: " + provenance.error().message());
  else if (*provenance)
    apply(**provenance, catalog);
  return {};
}

}  // namespace reshard
