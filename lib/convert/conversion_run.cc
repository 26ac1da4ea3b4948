// SPDX-License-Identifier: Apache-2.0
// Running a prepared conversion: the copy, and the files next to it.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/memory_limit.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/convert/conversion.h"
#include "lib/convert/conversion_source.h"
#include "lib/convert/delta_chain.h"
#include "lib/convert/manifest.h"
#include "lib/convert/source_manifest.h"
#include "lib/device/crc32.h"
#include "lib/source/watched_files.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

// Returns config.json with this quantization_config (null: without one).
Result<Json> with_quantization(const Json& config, const Json& quantization) {
  Json out = Json::object();
  for (const Json::Member& m : TRY(config.as_object()))
    if (m.key != "quantization_config") out.set(m.key, m.value);
  if (!quantization.is_null()) out.set("quantization_config", quantization);
  return out;
}

}  // namespace

Result<Index> check_equal_tensors(const Draft& draft, FilePool& files, RunOptions run) {
  const Catalog& view = draft.merge            ? draft.merge->stored
                        : draft.changes.before ? *draft.changes.before
                                               : draft.view.catalog;
  std::vector<const EqualTensors*> pairs;
  std::vector<DigestRequest> kept, left_out;
  for (const EqualTensors& e : draft.output.equal) {
    const Tensor &a = view.tensors()[e.kept], &b = view.tensors()[e.left_out];
    if (is_same_data(a, b)) continue;
    if (draft.unpacking && (draft.view.computed.contains(e.kept) || draft.view.computed.contains(e.left_out)))
      return unsupported(view.where() + ": " + tensor_text(a.name) + " and " + tensor_text(b.name) +
                         " must be equal, but one of them is packed; unpack them with --family none first");
    pairs.push_back(&e);
    kept.push_back({e.kept, a.dtype});
    left_out.push_back({e.left_out, a.dtype});
  }
  if (pairs.empty()) return Index{0};
  run.progress = nullptr;
  FileSource of_kept(view, files), of_left_out(view, files);
  const auto expected = TRY(digest_tensors(kept, of_kept, run));
  const auto got = TRY(digest_tensors(left_out, of_left_out, run));
  for (std::size_t i = 0; i < pairs.size(); ++i)
    if (expected[i].target != got[i].target) return corrupt(view.where() + ": " + pairs[i]->otherwise);
  return of_left_out.checksums_checked();
}

Status Conversion::check_same_plan(std::uint64_t plan_fingerprint) const {
  if (TRY(all_equal(options_.run.ranks, plan_fingerprint))) return {};
  return io_error(source_.catalog().root +
                  ": the plans of the ranks differ: they see different checkpoints or were started with different "
                  "options");
}

bool Conversion::can_resume(const std::string& destination) const {
  return is_bucket_url(destination) || (!computes() && !target_->encoder());
}

Status Conversion::check_options(const std::string& destination) const {
  if (computes() && rank_count(options_.run.ranks) > 1 && options_.run.strategy != Strategy::kDirect)
    return usage_error(
        "several ranks can merge, quantize or otherwise compute values only if each reads what it writes: add "
        "--strategy direct");
  if (options_.resume == Resume::kRequire && !can_resume(destination))
    return unsupported(destination +
                       ": a run with merged, quantized or computed weights or compressed files cannot be resumed; "
                       "leave out --resume require");
  return {};
}

Result<Conversion::Outcome> Conversion::run(OutputPath destination) {
  if (is_bucket_url(destination.path)) return upload(std::move(destination));
  Transport* const ranks = options_.run.ranks;
  const std::uint64_t plan_fingerprint = fingerprint(plan_, source_view(), target_view());
  TRY(check_same_plan(plan_fingerprint));
  TRY(check_options(destination.path));
  const WatchedFiles read(rank_of(ranks) == 0 ? inputs() : std::vector<std::string>());
  ConversionSource origin(draft_, source_, adapter());
  const Index of_left_out = TRY(check_equal_tensors(draft_, source_.files(), options_.run));
  if (draft_.merge) TRY(check_merged(origin));
  const std::unique_ptr<DeltaChain> deltas = TRY(open_deltas(origin));
  // The manifest records the stored tensors, not those computed from them.
  const auto recorded = origin.computes()
                            ? std::nullopt
                            : TRY(SourceManifest::open(source_, plan_, source_view(), options_.model.families));
  destination.inputs.push_back(options_.source_path);
  for (std::string& path : inputs()) destination.inputs.push_back(std::move(path));
  std::optional<ResumeOptions> resume_options;
  if (can_resume(destination.path)) {
    resume_options.emplace();
    resume_options->resume = options_.resume;
    std::string text;
    if (rank_of(ranks) == 0) text = TRY(facts(plan_fingerprint));
    resume_options->facts = TRY(broadcast(ranks, std::move(text)));
    resume_options->group_bytes = options_.group_bytes;
    resume_options->on_note = options_.on_note;
  }
  const std::string work = destination.path + ".partial";
  const bool is_journaled = resume_options.has_value();
  auto output =
      TRY(Output::create(std::move(destination), *target_, Output::Space::kReserved, ranks, std::move(resume_options)));
  if (!is_journaled && output->removed_leftover() && options_.on_note)
    options_.on_note("removed " + work + " of an interrupted run");
  Result<Outcome> outcome = write(*output, origin, {recorded ? &*recorded : nullptr, deltas.get()}, read);
  if (!outcome) return output->give_up(outcome.error());
  outcome->checksums += of_left_out;
  return outcome;
}

Result<Conversion::Outcome> Conversion::write(Output& output, ConversionSource& origin, const Records& records,
                                              const WatchedFiles& read) {
  const auto proofs = TRY(copy_tensors(plan_, origin.tensors(), target_view(), output, options_.run));
  release_freed_memory();  // before the headers and metadata are made
  TRY(origin.finish(options_.run.ranks));
  Outcome outcome;
  outcome.checksums = origin.checksums_checked();
  if (records.source) outcome.digests = TRY(records.source->check(proofs, draft_.names.model, options_.run));
  if (records.deltas) TRY(records.deltas->check(*this, proofs, *origin.digests()));
  if (rank_of(options_.run.ranks) == 0) {
    for (const SideFile& file : TRY(side_files())) TRY(output.add_file(file.name, TRY(file.read())));
    TRY(output.add_text(std::string(kManifestFile),
                        [&](const Output::EmitText& emit) { write_manifest(*this, proofs, origin.digests(), emit); }));
    if (const auto path = read.replaced())
      return corrupt(printable(*path) +
                     ": changed while it was read, so the output would mix two versions; convert it again when "
                     "nothing writes to it");
  }
  TRY(output.commit());
  return outcome;
}

// Returns the facts on which the output's bytes depend, under names for messages.
Result<std::string> Conversion::facts(std::uint64_t plan_fingerprint) const {
  Json out = Json::object();
  const auto add = [&](const std::string& name, const std::string& value) { out.set(name, Json(value)); };
  const auto add_list = [&](const std::string& name, const std::vector<std::string>& values) {
    std::string text;
    for (const std::string& value : values) text += std::to_string(value.size()) + ":" + value;
    add(name, text);
  };
  const ConversionOptions& o = options_;
  add("the version of reshard", RESHARD_VERSION);
  add("how work is cut", "3");
  add("--to", std::string(format_.name));
  add("--mesh", o.placement.mesh.to_string());
  add("--layout", o.placement.layout ? o.placement.layout->name : "");
  add("--dtype", o.typing.dtype ? std::string(info(*o.typing.dtype).torch_name) : "");
  add("--names", draft_.names.to ? std::string(info(*draft_.names.to).title) : "");
  add("--part", o.selection.part);
  add_list("--include", o.selection.include);
  add_list("--exclude", o.selection.exclude);
  add_list("--keep-dtype", o.typing.keep_dtype);
  add("--max-shard-size", std::to_string(o.max_file_bytes));
  add("--shard-format", std::to_string(static_cast<int>(o.container)));
  add("--vocab-padding",
      o.vocabulary.vocab_padding ? std::to_string(static_cast<int>(*o.vocabulary.vocab_padding)) : "");
  add("--repair", std::to_string(int{o.repairs.vocabulary} + 2 * int{o.repairs.experts}));
  std::string files;
  for (const CatalogFile& file : target_->catalog().files) files += file.path + "\n" + std::to_string(file.size) + "\n";
  add("the output's files", std::to_string(crc32(0, as_bytes(files))));
  add("the plan", std::to_string(plan_fingerprint));  // a fingerprint of the source's metadata and of all options
  for (const auto& [what, reader] : {std::pair("source file ", static_cast<const Reader*>(&source_)),
                                     std::pair("file of the donor ", static_cast<const Reader*>(o.donor)),
                                     std::pair("file of the adapter ", static_cast<const Reader*>(o.adapter.reader))}) {
    for (std::uint32_t f = 0; reader && f < reader->catalog().files.size(); ++f) {
      const auto entry = TRY(entry_at(reader->catalog().file_path(f)));
      add(what + reader->catalog().files[f].path,
          entry ? std::to_string(entry->size) + " " + std::to_string(entry->mtime_ns) : "none");
    }
  }
  return to_text(out, 0);
}

Result<std::string> Conversion::manifest_text(const RunOptions& run, const SourceManifest* recorded) {
  ConversionSource origin(draft_, source_, adapter());
  if (draft_.merge) TRY(check_merged(origin));
  const std::unique_ptr<DeltaChain> deltas = TRY(open_deltas(origin));
  std::vector<DigestRequest> requests;
  for (const PlannedTensor& p : plan_.tensors) requests.push_back({p.from, target_view().tensors()[p.to].dtype});
  const auto proofs = TRY(digest_tensors(requests, origin.tensors(), run));
  TRY(origin.finish(run.ranks));
  if (recorded) TRY(recorded->check(proofs, draft_.names.model, run));
  if (deltas) TRY(deltas->check(*this, proofs, *origin.digests()));
  return manifest(*this, proofs, origin.digests());
}

Result<std::unique_ptr<DeltaChain>> Conversion::open_deltas(const ConversionSource& origin) const {
  if (!draft_.merge || !draft_.merge->options.applies_deltas) return std::unique_ptr<DeltaChain>();
  auto out = std::make_unique<DeltaChain>(TRY(DeltaChain::open(draft_.merge->options)));
  TRY(out->check_start(*this, origin, options_.run));
  return out;
}

// Checks the tensors that must be equal, within each source and between the sources.
Status Conversion::check_merged(const ConversionSource& origin) const {
  const Merge& merge = *draft_.merge;
  for (std::size_t s = 0; s < draft_.others.size(); ++s)
    TRY(check_equal_tensors(*draft_.others[s], merge.options.sources[s + 1].reader->files(), options_.run));
  return check_not_merged(merge, origin.merged(), options_.run);
}

std::vector<std::string> Conversion::inputs() const {
  std::vector<std::string> out = {draft_.config.path};
  const auto add = [&](const Reader& reader) {
    const Catalog& catalog = reader.catalog();
    for (std::string& path : catalog.file_paths()) out.push_back(std::move(path));
    for (const std::string& name : catalog.metadata_files) out.push_back(path_join(catalog.root, name));
  };
  for (const Reader* reader : {static_cast<const Reader*>(&source_), static_cast<const Reader*>(options_.donor),
                               static_cast<const Reader*>(options_.adapter.reader)})
    if (reader) add(*reader);
  for (std::size_t s = 1; options_.merge && s < options_.merge->sources.size(); ++s) {
    out.push_back(options_.merge->sources[s].path);
    add(*options_.merge->sources[s].reader);
  }
  return out;
}

Result<std::vector<SideFile>> Conversion::side_files() const {
  std::vector<SideFile> out;
  if (draft_.config.is_there() && draft_.config.is_copied) {
    std::string text = draft_.config.text;
    Json json = TRY(parse_json(text, kConfigFile));
    const bool is_other = options_.typing.dtype && converted_tensors() > 0 && json.contains("model_type");
    if (is_other || draft_.requantized.stored) {
      if (draft_.requantized.stored) json = TRY(with_quantization(json, draft_.requantized.config));
      if (is_other)
        json.set(json.contains("dtype") ? "dtype" : "torch_dtype", Json(info(*options_.typing.dtype).torch_name));
      text = python_text(json);
    }
    out.push_back({std::string(kConfigFile), std::move(text), ""});
  }
  out.insert(out.end(), draft_.side_files.begin(), draft_.side_files.end());
  return out;
}

}  // namespace reshard
