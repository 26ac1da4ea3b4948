// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <set>

#include "lib/audit/duplicates.h"
#include "lib/audit/metadata_audits.h"
#include "lib/audit/replicas.h"
#include "lib/audit/verification_steps.h"
#include "lib/base/json.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/device/convert.h"
#include "lib/model/parts.h"
#include "lib/model/view.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

// Returns nothing if there is no manifest.
Result<std::optional<Json>> read_manifest(const OpenedSource& opened, const std::string& path,
                                          const std::string& manifest) {
  if (!TRY(is_directory(path)) && !opened.checkpoint.format->is_file) return std::optional<Json>();
  const auto text = TRY(opened.reader().side_file(std::string(kManifestFile), kMaxManifestBytes));
  return text ? std::optional(TRY(parse_json(*text, manifest))) : std::optional<Json>();
}

ValueContext value_context(const Catalog& view, const Model& model) {
  ValueContext context;
  context.vocab_size = model.config ? model.config->vocab_size() : 0;
  for (const Tensor& t : view.tensors()) {
    const StateKey key = split_state_key(t.key());
    const auto parsed =
        model.family && !key.parameter.empty() ? parse_name(*model.family, key.parameter) : std::nullopt;
    if (parsed && parsed->rule->is_vocabulary()) context.vocabulary.push_back(t.name);
  }
  return context;
}

// Returns the model tensors that are stored twice, keyed by their float32 masters: one is the other rounded.
std::map<std::size_t, std::size_t> weights_of_masters(const Catalog& view) {
  std::map<std::string, std::size_t> model;
  for (std::size_t i = 0; i < view.tensors().size(); ++i)
    if (const Tensor& t = view.tensors()[i]; !t.model_dtype && split_state_key(t.key()).kind == StateKind::kModel)
      model.emplace(t.key(), i);
  std::map<std::size_t, std::size_t> out;
  for (std::size_t i = 0; i < view.tensors().size(); ++i) {
    const Tensor& t = view.tensors()[i];
    const StateKey key = split_state_key(t.key());
    const auto weight = key.suffix == kMasterSuffix ? model.find(key.parameter) : model.end();
    if (weight == model.end()) continue;
    const Tensor& w = view.tensors()[weight->second];
    if (w.shape == t.shape && byte_size(w.dtype) < byte_size(t.dtype) && can_convert(t.dtype, w.dtype))
      out.emplace(i, weight->second);
  }
  return out;
}

void check_masters(const Catalog& view, const std::map<std::size_t, std::size_t>& masters,
                   const std::vector<TensorProof>& proofs, VerifyReport& report) {
  if (masters.empty()) return;
  report.checked("master-differs", "the weights equal their rounded masters", std::ssize(masters));
  std::vector<std::string> differing;
  for (const auto& [master, weight] : masters)
    if (!(proofs[master].target == proofs[weight].source)) differing.push_back(view.tensors()[weight].name);
  if (differing.empty()) return;
  Finding& f = report.add(
      Severity::kWarning, "master-differs",
      std::string(differing.size() == 1 ? "does not equal its float32 master" : "do not equal their float32 masters") +
          " rounded to the model's dtype");
  f.tensors = std::move(differing);
  f.advice =
      "Training resumes from the masters, but a loader of the model uses the other copy. Add --weights master to "
      "convert the masters.";
}

// Reads the objects, which verifies their checksums. Those of classes that reshard does not know are listed.
Status read_objects(Reader& reader, VerifyReport& report) {
  const Catalog& catalog = reader.catalog();
  std::vector<std::string> unread;
  for (const Blob& blob : catalog.blobs) {
    if (!fits_inside(blob.extent.offset, blob.extent.length, catalog.files[blob.extent.file].size)) continue;
    const auto bytes = reader.blob_bytes(blob);
    if (bytes) continue;
    if (bytes.error().code() != ErrorCode::kUnsupported) return bytes.error();
    unread.push_back(blob.name);
  }
  if (!unread.empty())
    report.fact("not read",
                count_of(std::ssize(unread), "object") + " of a form that reshard does not read: " + folded(unread));
  return {};
}

Status read_tensors(const Catalog& view, const OpenedSource& opened, const Model& model, const VerifyOptions& options,
                    VerifyReport& report) {
  RunOptions run = options.run;
  run.progress = watch(options, view.tensor_bytes());
  // Several ranks read on, so that all do the same. A single process stops at the first damage.
  if (rank_count(run.ranks) == 1) run.damage = nullptr;
  std::vector<TensorProof> proofs;
  Index checksums = 0;
  if (options.values) {
    ValueContext context = value_context(view, model);
    context.exponents = options.exponents;
    ValueReport values = TRY(check_values(view, opened.reader().files(), context, run));
    proofs = std::move(values.proofs);
    checksums = values.checksums_checked;
    for (const auto& [id, title] :
         {std::pair("non-finite", "no NaN and no infinity"), std::pair("zero", "no weights and no rows are all zero"),
          std::pair("constant", "no weights and no rows are constant"),
          std::pair("unused-tokens", "every token was trained"),
          std::pair("padding-rows", "no rows only pad the vocabulary"),
          std::pair("near-overflow", "no value is near the limit of its type"),
          std::pair("large-values", "no weight is unusually large")})
      report.checked(id, title, std::ssize(values.tensors));
    report.values = std::move(values.tensors);
    report.add(std::move(values.findings));
  } else {
    FileSource source(view, opened.reader().files());
    std::vector<DigestRequest> requests;
    for (std::size_t i = 0; i < view.tensors().size(); ++i) requests.push_back({i, view.tensors()[i].dtype});
    const auto masters = weights_of_masters(view);
    for (const auto& [master, weight] : masters) requests[master].as = view.tensors()[weight].dtype;
    proofs = TRY(digest_tensors(requests, source, run));
    check_masters(view, masters, proofs, report);
    checksums = source.checksums_checked();
  }
  for (std::size_t i = 0; i < proofs.size(); ++i) {
    const Tensor& t = view.tensors()[i];
    report.tensors.push_back({t.name, t.dtype, t.shape, proofs[i].source, std::nullopt});
  }
  const Status objects = read_objects(opened.reader(), report);
  if (!objects && !skips_damage(options.run, objects.error())) return objects;
  report.fact("bytes", checksums_text(checksums, "the format records"));
  return {};
}

// Returns whether the reader derives the tensor from others that were written: a weight from its master or vice versa,
// or a parameter's step from the count that all share.
Result<bool> is_shown_of_others(const VerifiedTensor& tensor, const Json& recorded) {
  const StateKey key = split_state_key(tensor.name);
  if (key.suffix == kStepSuffix) return recorded.contains(key.prefix + key.parameter + std::string(kMomentSuffix));
  const bool is_master = key.suffix == kMasterSuffix;
  const Json* other =
      recorded.find(is_master ? key.parameter : "optimizer.state." + tensor.name + std::string(kMasterSuffix));
  return other && TRY(other->get_string("digest")) == tensor.digest.hex();
}

Status compare_manifest(const Json& manifest, const std::string& path, VerifyReport& report) {
  report.checked("manifest", "digests match reshard_manifest.json", std::ssize(report.tensors));
  const Json* recorded = manifest.find("tensors");
  if (!recorded || !recorded->is_object()) return corrupt(path + ": expected an object 'tensors'");
  std::vector<std::string> differing, unknown, absent;
  std::set<std::string_view> names;
  for (const VerifiedTensor& t : report.tensors) {
    names.insert(t.name);
    const Json* entry = recorded->find(t.name);
    if (!entry && TRY(is_shown_of_others(t, *recorded).context(path))) continue;
    if (!entry)
      unknown.push_back(t.name);
    else if (TRY(entry->get_string("digest").context(path)) != t.digest.hex())
      differing.push_back(t.name);
  }
  for (const auto& member : TRY(recorded->as_object()))
    if (!report.is_partial && !names.contains(member.key)) absent.push_back(member.key);
  if (differing.empty() && unknown.empty() && absent.empty())
    report.fact("manifest", count_of(std::ssize(report.tensors), "digest") + " match reshard_manifest.json");
  const auto say = [&](std::vector<std::string> tensors, std::string id, std::string what) {
    if (!tensors.empty()) report.add(Severity::kError, std::move(id), std::move(what)).tensors = std::move(tensors);
  };
  say(std::move(differing), "manifest-digest", "the digest differs from reshard_manifest.json");
  say(std::move(unknown), "manifest-unknown", "not in reshard_manifest.json");
  say(std::move(absent), "manifest-absent", "only in reshard_manifest.json");
  return {};
}

// Reports a head that differs from the embedding to which the config ties it: loaders use one of the two. Conventions
// that store a head nobody uses are left alone.
// report.tensors[i] is the digest of view.tensors()[i].
void check_tied_head(const Catalog& view, const Model& model, VerifyReport& report) {
  if (!model.is_described() || !model.config->tie_word_embeddings()) return;
  if (info(model.convention).keeps_tied_head) return;
  for (std::size_t head = 0; head < view.tensors().size(); ++head) {
    const auto parsed = parse_name(*model.family, view.tensors()[head].key());
    if (!parsed || parsed->rule->tied_to.empty()) continue;
    for (std::size_t i = 0; i < view.tensors().size(); ++i) {
      if (canonical_key(*model.family, view.tensors()[i].key()) != parsed->rule->tied_to) continue;
      const VerifiedTensor &stored = report.tensors[head], &embedding = report.tensors[i];
      if (embedding.dtype != stored.dtype || embedding.digest == stored.digest) continue;
      Finding& f = report.add(Severity::kError, "tied-differ",
                              "differs from the embedding that " + model.config->path + " ties it to");
      f.tensors = {stored.name};
      f.advice = "A loader keeps the embedding and drops the head: set tie_word_embeddings to false to keep both.";
    }
  }
}

Status check_replicas(const Catalog& catalog, FilePool& files, const VerifyOptions& options, VerifyReport& report) {
  ReplicaReport replicas = TRY(compare_replicas(catalog, files, options.run));
  report.checked("replicas", "all copies of a piece are equal", replicas.copies);
  report.fact("replicas", replicas.copies == 0 ? std::string("every piece is stored once; nothing to compare")
                                               : with_commas(replicas.copies) +
                                                     (replicas.copies == 1 ? " further copy" : " further copies") +
                                                     " of " + count_of(replicas.tensors, "tensor") + " (" +
                                                     human_bytes(replicas.bytes) + ") compared");
  report.add(std::move(replicas.findings));
  return {};
}

Result<Catalog> chosen_tensors(const Catalog& from, const std::vector<std::size_t>& wanted) {
  if (wanted.size() == from.tensors().size()) return from;
  Catalog out = from.without_tensors();
  out.parts = from.parts;
  for (const std::size_t i : wanted) TRY(out.add(from.tensors()[i]));
  return out;
}

// Reads the tensors that are not in `unreadable`.
Status read_everything(const OpenedSource& opened, const Model& model, const VerifyOptions& options,
                       std::set<std::size_t> unreadable, VerifyReport& report) {
  const std::string path = path_join(options.path, kManifestFile);
  std::optional<Json> manifest = TRY(read_manifest(opened, options.path, path));
  if (!options.keys.part.empty()) manifest.reset();  // it covers all parts
  const Catalog& catalog = opened.catalog();
  const auto readable = [&] {
    std::vector<std::size_t> out = readable_tensors(catalog, unreadable);
    std::erase_if(out, [&](std::size_t i) { return !is_of_part(catalog.tensors()[i].key(), options.keys.part); });
    return out;
  };
  report.add(locate_each(opened.reader(), readable(), options.run.threads, options.spool, unreadable));
  const Catalog chosen = TRY(chosen_tensors(catalog, readable()));
  report.is_partial = !unreadable.empty() || !catalog.unread_files.empty();
  if (!unreadable.empty())
    report.fact("not read",
                count_of(std::ssize(unreadable), "tensor") + " of " + with_commas(std::ssize(catalog.tensors())));
  Catalog view = chosen;
  if (manifest) {
    auto recorded = recorded_view(*manifest, chosen, model.config_or_null(), options.model.families).context(path);
    if (!recorded && !report.is_partial) return std::move(recorded).error();
    if (recorded)
      view = *std::move(recorded);
    else
      manifest.reset();  // the tensors that are left are not enough to form those that it records
  }
  TRY(read_tensors(view, opened, model, options, report));
  if (manifest) TRY(compare_manifest(*manifest, path, report));
  check_tied_head(view, model, report);
  std::vector<Digest> digests;
  for (const VerifiedTensor& t : report.tensors) digests.push_back(t.digest);
  report.checked("weights", "no weights are stored under two names", std::ssize(digests));
  report.add(TRY(audit_duplicates(view, digests, model, opened.reader().files(), options.run)));
  return options.replicas ? check_replicas(chosen, opened.reader().files(), options, report) : Status();
}

// Reads the tensors that are not in `unreadable`. Returns the error about bytes that are damaged, if some are; of
// several ranks, that of the lowest that has one.
Result<std::optional<Error>> read_until_damage(const OpenedSource& opened, const Model& model,
                                               const VerifyOptions& options, const std::set<std::size_t>& unreadable,
                                               VerifyReport& report) {
  Transport* const ranks = options.run.ranks;
  DamageNote note;
  VerifyOptions noting = options;
  noting.run.damage = &note;
  const Status read = read_everything(opened, model, noting, unreadable, report);
  // One of several ranks must fail: the others wait for its part, or learn of a failure from the job.
  const bool is_alone = rank_count(ranks) == 1;
  if (!read && (!is_alone || read.error().code() != ErrorCode::kCorrupt)) return read.error();
  if (!read) return std::optional(read.error());
  const auto own = note.first();
  std::string message;
  for (const std::string& each : TRY(gather(ranks, own ? own->message() : "")))
    if (message.empty()) message = each;
  message = TRY(broadcast(ranks, std::move(message)));
  return message.empty() ? std::nullopt : std::optional(corrupt(std::move(message)));
}

// Reads the tensors that are not in `unreadable` one by one, each on one of the ranks. Adds those whose bytes are
// damaged to it, and returns a finding about them; nothing if there are none.
Result<std::optional<Finding>> find_damaged(const OpenedSource& opened, RunOptions run,
                                            std::set<std::size_t>& unreadable) {
  const Catalog& catalog = opened.catalog();
  Transport* const ranks = std::exchange(run.ranks, nullptr);
  const std::vector<std::size_t> tensors = readable_tensors(catalog, unreadable);
  std::string mine;  // of each damaged tensor its number, a space, the error of the first few, and a zero
  std::size_t count = 0;
  for (std::size_t k = rank_of(ranks); k < tensors.size(); k += rank_count(ranks)) {
    const Catalog one = TRY(chosen_tensors(catalog, {tensors[k]}));
    FileSource source(one, opened.reader().files());
    const auto read = digest_tensors({{0, one.tensors()[0].dtype}}, source, run);
    if (read) continue;
    if (read.error().code() != ErrorCode::kCorrupt) return read.error();
    mine += std::to_string(tensors[k]) + " " + (count++ < kShown ? read.error().message() : "") + '\0';
  }
  std::string all = TRY(broadcast(ranks, join(TRY(gather(ranks, mine)), "")));
  std::map<std::size_t, std::string> damaged;
  for (std::size_t at = 0, end = 0; (end = all.find('\0', at)) != std::string::npos; at = end + 1) {
    const std::size_t space = all.find(' ', at);
    damaged.emplace(*parse_number(std::string_view(all).substr(at, space - at)),
                    all.substr(space + 1, end - space - 1));
  }
  if (damaged.empty()) return std::optional<Finding>();
  Finding out{Severity::kError, "bytes-damaged", {}, "the stored bytes are damaged", {}, "", ""};
  out.advice = "Restore the files from another copy of the checkpoint.";
  for (const auto& [number, message] : damaged) {
    unreadable.insert(number);
    out.tensors.push_back(catalog.tensors()[number].name);
    if (out.why.size() < kShown) out.why.push_back(message);
  }
  return std::optional(std::move(out));
}

// Reads the tensors that are not in `unreadable`. If bytes of some are damaged, reports these and reads the others.
Status read_undamaged(const OpenedSource& opened, const Model& model, const VerifyOptions& options,
                      std::set<std::size_t> unreadable, VerifyReport& report) {
  const VerifyReport before = report;
  auto damage = TRY(read_until_damage(opened, model, options, unreadable, report));
  if (!damage) return {};
  if (auto damaged = TRY(find_damaged(opened, options.run, unreadable))) {
    report = before;
    report.add({*std::move(damaged)});
    damage = TRY(read_until_damage(opened, model, options, unreadable, report));
  }
  if (damage)
    report.add_message("bytes-damaged", damage->message()).advice =
        "Restore this file from another copy of the checkpoint.";
  return {};
}

constexpr const char* kBytesTitle = "checksums and digests match";

}  // namespace

std::function<void(Index)> watch(const VerifyOptions& options, Index bytes) {
  return options.watch ? options.watch(bytes) : nullptr;
}

std::string checksums_text(Index count, const char* where) {
  return count > 0 ? count_of(count, "CRC-32 sum") + " recorded, all match"
                   : std::string("read completely; ") + where + " no checksums";
}

Status check_bytes(const OpenedSource& opened, const Model& model, const Structure& structure,
                   const VerifyOptions& options, VerifyReport& report) {
  const auto skip = [&](std::string why) {
    report.skipped("bytes", kBytesTitle, std::move(why));
    return Status();
  };
  if (!options.asks_for_data() && !options.asks_for_nothing())
    return skip("only metadata was requested; add --bytes to read everything");
  if (structure.metadata_only && options.asks_for_data())
    report.add(Severity::kError, "file-missing", "there are no data files to read");
  const Index readable = report.tensor_count - std::ssize(structure.unreadable);
  if (!structure.is_readable && readable == 0) {
    const std::string why = "the data cannot be read as the metadata says";
    report.facts.emplace_back("bytes", "not checked: " + why);
    return skip(why);
  }
  report.read_data = true;
  report.checked("bytes", kBytesTitle, readable);
  return read_undamaged(opened, model, options, structure.unreadable, report);
}

}  // namespace reshard
