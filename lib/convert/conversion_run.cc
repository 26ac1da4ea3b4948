// Running what conversion.cc prepared: the copy, and what lies beside it.
#include <string_view>
#include <utility>

#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/convert/conversion.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

// Whether two tensors are the same bytes of the same files.
bool are_one(const Tensor& a, const Tensor& b) {
  if (a.dtype != b.dtype || !a.fragments.has_boxes_of(b.fragments)) return false;
  for (std::size_t i = 0; i < a.fragments.size(); ++i)
    if (!(a.fragments.get(i) == b.fragments.get(i))) return false;
  return true;
}

}  // namespace

Result<Index> Conversion::check_equal_tensors() {
  std::vector<const EqualTensors*> pairs;
  std::vector<DigestRequest> kept, left_out;
  for (const EqualTensors& e : equal_tensors_) {
    const Tensor &a = source_view_.tensors()[e.kept], &b = source_view_.tensors()[e.left_out];
    if (are_one(a, b)) continue;
    pairs.push_back(&e);
    kept.push_back({e.kept, a.dtype});
    left_out.push_back({e.left_out, a.dtype});
  }
  if (pairs.empty()) return Index{0};
  RunOptions quiet = options_.run;
  quiet.progress = nullptr;
  FileSource of_kept(source_view_, source_.files()), of_left_out(source_view_, source_.files());
  const auto expected = TRY(digest_tensors(kept, of_kept, quiet));
  const auto got = TRY(digest_tensors(left_out, of_left_out, quiet));
  for (std::size_t i = 0; i < pairs.size(); ++i)
    if (expected[i].target != got[i].target) return corrupt(selected_.root + ": " + pairs[i]->otherwise);
  return of_left_out.checksums_checked();
}

Result<Conversion::Outcome> Conversion::run(OutputPath destination) {
  Transport* const ranks = options_.run.ranks;
  const bool leads = rank_of(ranks) == 0;
  if (!TRY(all_equal(ranks, fingerprint(plan_, source_view_, target_view_))))
    return io_error(selected_.root +
                    ": the ranks do not see the same checkpoint, or were not started with the same options: their "
                    "plans differ");
  const Index of_left_out = TRY(check_equal_tensors());
  FileSource source(source_view_, source_.files());
  destination.inputs.insert(destination.inputs.end(), {options_.source_path, options_.config_path});
  for (const Reader* reader : {static_cast<const Reader*>(&source_), static_cast<const Reader*>(options_.donor)})
    for (std::uint32_t f = 0; reader && f < reader->catalog().files.size(); ++f)
      destination.inputs.push_back(reader->catalog().file_path(f));
  auto output = TRY(Output::create(std::move(destination), *target_, Output::Space::kReserved, ranks));
  const auto proofs = TRY(copy_tensors(plan_, source, target_view_, *output, options_.run));
  Outcome outcome;
  outcome.removed_leftover = output->removed_leftover();
  outcome.checksums = of_left_out + source.checksums_checked();
  if (leads) {
    outcome.files_copied = TRY(add_side_files(*output));
    TRY(output->add_file(std::string(kManifestFile), manifest(proofs)));
  }
  TRY(output->commit());
  return outcome;
}

// The tokenizer's files, from beside the config or the source. What is said of one that is left is a warning.
std::vector<std::string> Conversion::tokenizer_paths(std::vector<std::string>* warnings) const {
  std::vector<std::string> places = {selected_.root, parent_path(selected_.root)};
  if (!options_.config_path.empty()) places.insert(places.begin(), parent_path(options_.config_path));
  std::vector<std::string> out;
  for (const std::string_view name : format_.side_files) {
    for (const std::string& place : places) {
      const std::string path = path_join(place, name);
      if (!path_exists(path)) continue;
      const auto real = leads_out(path, place);
      if (!real)
        out.push_back(path);
      else if (warnings)
        warnings->push_back(path + " leads out of the checkpoint, to " + printable(*real) + ": it is not copied");
      break;
    }
  }
  return out;
}

// config.json and the tokenizer.
Result<std::vector<std::string>> Conversion::add_side_files(Output& output) const {
  std::vector<std::string> copied;
  if (!config_text_.empty() && copies_config_) {
    std::string text = config_text_;
    if (converted_ > 0) {
      Json json = TRY(parse_json(text, std::string(kConfigFile)));
      json.set(json.contains("dtype") ? "dtype" : "torch_dtype", Json(info(*options_.dtype).torch_name));
      text = to_text(json, 2) + "\n";
    }
    TRY(output.add_file(std::string(kConfigFile), text));
    copied.emplace_back(kConfigFile);
  }
  for (const std::string& path : tokenizer_paths(nullptr)) {
    TRY(output.add_file(base_name(path), TRY(read_whole_file(path, kMaxSideFile))));
    copied.push_back(base_name(path));
  }
  return copied;
}

std::string Conversion::manifest(const std::vector<TensorProof>& proofs) const {
  Json tensors = Json::object();
  for (std::size_t i = 0; i < plan_.tensors.size(); ++i) {
    const Tensor& from = source_view_.tensors()[plan_.tensors[i].from];
    const Tensor& to = target_view_.tensors()[plan_.tensors[i].to];
    Json shape = Json::array();
    for (const Index extent : to.shape) shape.push_back(extent);
    Json entry = Json::object();
    entry.set("dtype", info(to.dtype).torch_name).set("shape", std::move(shape)).set("digest", proofs[i].target.hex());
    if (from.dtype != to.dtype)
      entry.set("source_dtype", info(from.dtype).torch_name).set("source_digest", proofs[i].source.hex());
    tensors.set(to.name, std::move(entry));
  }
  Json left_out = Json::array();
  for (const LeftOut& l : left_out_) {
    Json entry = Json::object();
    entry.set("what", l.what).set("tensors", l.tensors).set("objects", l.objects).set("bytes", l.bytes);
    Json names = Json::array();
    for (const std::string& name : l.names) names.push_back(name);
    if (!l.names.empty()) entry.set("names", std::move(names));
    left_out.push_back(std::move(entry));
  }
  Json globs = Json::object();
  for (const auto& [key, list] : {std::pair("include", &options_.include), std::pair("exclude", &options_.exclude),
                                  std::pair("keep_dtype", &options_.keep_dtype)}) {
    Json items = Json::array();
    for (const std::string& glob : *list) items.push_back(glob);
    globs.set(key, std::move(items));
  }
  Json files = Json::object();
  for (const CatalogFile& file : target_->catalog().files) files.set(file.path, file.size);
  Json options = Json::object();
  options.set("to", format_.name)
      .set("mesh", options_.mesh.to_string())
      .set("layout", options_.layout ? Json(options_.layout->name) : Json())
      .set("dtype", options_.dtype ? info(*options_.dtype).torch_name : "keep")
      .set("names", target_convention_ ? convention_title(*target_convention_) : "as in the source")
      .set("filters", std::move(globs));
  Json manifest = Json::object();
  manifest.set("reshard", RESHARD_VERSION)
      .set("source", options_.source_path)
      .set("options", std::move(options))
      .set("family", model_.family && renames() ? Json(model_.family->name) : Json())
      .set("hf_rows", hf_rows_)
      .set("left_out", std::move(left_out))
      .set("repairs", repairs_);
  if (!target_->is_file()) manifest.set("files", std::move(files));
  manifest.set("tensors", std::move(tensors));
  return to_text(manifest, 1) + "\n";
}

}  // namespace reshard
