// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/manifest.h"

#include <functional>
#include <string_view>
#include <utility>

#include "lib/base/json.h"
#include "lib/checkpoint/provenance.h"
#include "lib/model/parts.h"

namespace reshard {

namespace {

Json merge_of(const Merge& merge) {
  Json sources = Json::array();
  for (const MergeSource& source : merge.options.sources) {
    Json entry = Json::object();
    entry.set("name", source.name).set("path", source.path);
    sources.push_back(std::move(entry));
  }
  Json out = Json::object();
  out.set("expression", merge.expression.text()).set("accumulate", merge.options.in_double ? "float64" : "float32");
  if (merge.others_from) out.set("others_from", merge.options.others_from);
  return out.set("sources", std::move(sources));
}

// Returns a tensor's line in the member "tensors" of a manifest, formatted as to_text() would.
std::string line_of(const std::string& name, const Json& entry) {
  std::string out = "  ";
  append_json_string(out, name);
  return out + ": " + to_text(entry, 1, 2);
}

// Returns the line of one of the plan's tensors.
std::string line_of(const Conversion& c, std::size_t i, const TensorProof& proof, const MergeDigests* sources) {
  const Tensor& from = c.source_view().tensors()[c.plan().tensors[i].from];
  const Tensor& to = c.target_view().tensors()[c.plan().tensors[i].to];
  Json shape = Json::array();
  for (const Index extent : to.joined_shape()) shape.push_back(extent);
  Json entry = Json::object();
  entry.set("dtype", info(to.dtype).torch_name).set("shape", std::move(shape)).set("digest", proof.target.hex());
  if (from.dtype != to.dtype)
    entry.set("source_dtype", info(from.dtype).torch_name).set("source_digest", proof.source.hex());
  if (sources) {
    Json read = Json::array();
    for (const Digest& digest : sources->of(c.plan().tensors[i].from)) read.push_back(digest.hex());
    entry.set("merged_digests", std::move(read));
  }
  return line_of(to.name, entry);
}

}  // namespace

void write_manifest(const Conversion& c, const std::vector<TensorProof>& proofs, const MergeDigests* sources,
                    const std::function<void(std::string_view)>& emit) {
  const ConversionOptions& o = c.options();
  const Translation& names = c.names();
  Json left_out = Json::array();
  for (const OmittedState& l : c.notes().left_out) {
    Json entry = Json::object();
    entry.set("what", l.what).set("tensors", l.tensors).set("objects", l.objects).set("bytes", l.bytes);
    Json tensors_left = Json::array();
    for (const std::string& name : l.names) tensors_left.push_back(name);
    if (!l.names.empty()) entry.set("names", std::move(tensors_left));
    left_out.push_back(std::move(entry));
  }
  Json globs = Json::object();
  for (const auto& [key, list] :
       {std::pair("include", &o.selection.include), std::pair("exclude", &o.selection.exclude),
        std::pair("keep_dtype", &o.typing.keep_dtype)}) {
    Json items = Json::array();
    for (const std::string& glob : *list) items.push_back(glob);
    globs.set(key, std::move(items));
  }
  Json options = Json::object();
  options.set("to", c.format().name)
      .set("mesh", o.placement.mesh.to_string())
      .set("layout", o.placement.layout ? Json(o.placement.layout->name) : Json())
      .set("dtype", o.typing.dtype ? info(*o.typing.dtype).torch_name : "keep")
      .set("names", names.to ? info(*names.to).title : "as in the source")
      .set("filters", std::move(globs));
  Json files = Json::object();
  for (const CatalogFile& file : c.target().catalog().files) files.set(file.path, file.size);
  for (const SideFile& file : c.beside()) files.set(file.name, file.bytes);
  Json manifest = Json::object();
  manifest.set("reshard", RESHARD_VERSION)
      .set("source", o.source_path)
      .set(kProvenance, c.provenance())
      .set("options", std::move(options))
      .set("family", names.renames() ? Json(names.model.family->name) : Json())
      .set("hf_rows", names.hf_rows)
      .set("left_out", std::move(left_out))
      .set("repairs", c.notes().repairs);
  if (c.merge()) manifest.set("merge", merge_of(*c.merge()));
  if (c.notes().arithmetic.size() > 0) manifest.set("arithmetic", c.notes().arithmetic);
  if (!c.target().single_file()) manifest.set("files", std::move(files));
  bool is_first = true;
  for (std::size_t i = 0; i < c.plan().tensors.size(); ++i) {
    // An adapter is not part of the model that a reader of this output finds.
    if (c.target_view().tensors()[c.plan().tensors[i].to].name.starts_with(kAdapterPrefix)) continue;
    if (is_first) {
      std::string text = to_text(manifest, 1);
      text.resize(text.size() - 2);  // the end of the last member's line, and "}"
      emit(text + ",\n \"tensors\": {\n");
    } else {
      emit(",\n");
    }
    is_first = false;
    emit(line_of(c, i, proofs[i], sources));
  }
  emit(is_first ? to_text(manifest.set("tensors", Json::object()), 1) + "\n" : "\n }\n}\n");
}

std::string manifest(const Conversion& c, const std::vector<TensorProof>& proofs, const MergeDigests* sources) {
  std::string text;
  write_manifest(c, proofs, sources, [&](std::string_view part) { text += part; });
  return text;
}

ManifestOutline outline_manifest(const Conversion& c) {
  ManifestOutline out;
  std::size_t parts = 0;
  const auto sources = c.merge() ? std::make_unique<MergeDigests>(*c.merge()) : nullptr;
  write_manifest(c, std::vector<TensorProof>(c.plan().tensors.size()), sources.get(), [&](std::string_view part) {
    if (parts++ == 0) out.head = part;
    out.length += std::ssize(part);
  });
  if (parts == 1) out.head.clear();
  return out;
}

}  // namespace reshard
