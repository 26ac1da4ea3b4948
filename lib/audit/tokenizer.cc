// SPDX-License-Identifier: Apache-2.0
#include <map>

#include "lib/audit/metadata_audits.h"
#include "lib/base/file.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard {
namespace {

constexpr Index kMaxFileBytes = Index{128} << 20;  // published ones have up to 33 MB
constexpr std::size_t kShownTokens = 3;
constexpr std::size_t kShownCharacters = 40;

// A tokenizer.json with a quarter of a million words has twice as many merges. Only the parts that have ids are parsed,
// and the others are skipped.
class Spans {
 public:
  Spans(std::string_view text, std::size_t at) : text_(text), at_(at) {}

  std::size_t at() const { return at_; }
  char here() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n,:").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  void enter() { ++at_; }

  // Returns the next value or key as text, or an empty text at the end of the container or the text.
  std::string_view next() {
    skip_space();
    const std::size_t begin = at_;
    if (here() == '"') {
      skip_string();
    } else if (here() == '{' || here() == '[') {
      skip_container();
    } else {
      while (at_ < text_.size() && std::string_view(",]} \t\r\n").find(text_[at_]) == std::string_view::npos) ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }

 private:
  void skip_string() {
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_)
      if (text_[at_] == '\\') ++at_;
    at_ = std::min(at_ + 1, text_.size());
  }
  void skip_container() {
    for (Index depth = 0; at_ < text_.size();) {
      const char c = text_[at_];
      if (c == '"') {
        skip_string();
        continue;
      }
      ++at_;
      depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
      if (depth == 0) return;
    }
  }

  std::string_view text_;
  std::size_t at_;
};

// Returns a member of an object as text, or an empty text if there is none.
std::string_view member(std::string_view object, std::string_view key) {
  Spans spans(object, 0);
  spans.skip_space();
  if (spans.here() != '{') return {};
  spans.enter();
  for (;;) {
    const std::string_view name = spans.next();
    if (name.size() < 2) return {};
    const std::string_view value = spans.next();
    if (name.substr(1, name.size() - 2) == key) return value;
  }
}

// The ids at or beyond the vocabulary, and the number of tokens.
struct Tokens {
  explicit Tokens(Index vocabulary) : words(vocabulary) {}
  void add(Index id, std::string_view token) {
    ++count;
    if (id >= words) beyond.emplace(id, token);
  }
  Index words, count = 0;
  std::map<Index, std::string> beyond;
};

Status read_map(std::string_view text, const std::string& path, Tokens& tokens) {
  return parse_json_members(text, path, [&](const std::string& token, const Json& id) -> Status {
    tokens.add(TRY(id.as_index().context(path)), token);
    return {};
  });
}

// {"added_tokens": [{"id": 7, "content": "<pad>"}], "model": {"vocab": {"a": 0} or [["a", -1.5]]}}
Status read_tokenizer(std::string_view text, const std::string& path, Tokens& tokens) {
  if (const std::string_view added = member(text, "added_tokens"); !added.empty()) {
    const Json list = TRY(parse_json(added, path));
    for (const Json& token : TRY(list.as_array().context(path)))
      tokens.add(TRY(token.get_index("id").context(path)), TRY(token.get_string("content").context(path)));
  }
  const std::string_view vocab = member(member(text, "model"), "vocab");
  if (vocab.starts_with('{')) return read_map(vocab, path, tokens);
  if (!vocab.starts_with('[')) return {};
  Spans words(vocab, 1);
  for (Index id = 0;; ++id) {
    const std::string_view word = words.next();
    if (word.empty()) return {};
    std::string_view token;
    if (id >= tokens.words) {
      Spans inside(word, 1);
      token = inside.next();
      if (token.size() >= 2) token = token.substr(1, token.size() - 2);
    }
    tokens.add(id, token);
  }
}

std::string shown(std::string_view token) {
  const bool is_long = token.size() > kShownCharacters;
  return "'" + printable(token.substr(0, kShownCharacters)) + (is_long ? "..." : "") + "'";
}

}  // namespace

TokenizerAudit audit_tokenizer(const std::string& directory, const std::string& config_path, Index vocab_size) {
  TokenizerAudit out;
  Tokens tokens(vocab_size);
  std::vector<std::string> files;
  struct Source {
    const char* name;
    Status (*read)(std::string_view text, const std::string& path, Tokens& tokens);
  };
  for (const auto& [name, read] : {Source{"tokenizer.json", read_tokenizer}, Source{"added_tokens.json", read_map}}) {
    const std::string path = path_join(directory, name);
    const auto add = [&, read = read]() -> Result<bool> {
      if (!TRY(path_exists(path))) return false;
      TRY(read(TRY(read_whole_file(path, kMaxFileBytes)), path, tokens));
      return true;
    };
    const Result<bool> status = add();
    if (!status.has_value()) {
      out.skipped = status.error().message();
      return out;
    }
    if (*status) files.emplace_back(name);
  }
  out.tokens = tokens.count;
  if (files.empty()) out.skipped = "there is no tokenizer.json next to the config";
  if (tokens.beyond.empty()) return out;
  Finding f{Severity::kWarning, "tokenizer-larger", {}, "", {}, "", ""};
  f.what = join(files, " and ") + (files.size() == 1 ? " has " : " have ") +
           count_of(std::ssize(tokens.beyond), "token") + " without a row in the vocabulary";
  std::vector<std::string> first;
  for (const auto& [id, token] : tokens.beyond) {
    if (first.size() == kShownTokens) break;
    first.push_back(shown(token) + " is " + with_commas(id));
  }
  const auto more = std::ssize(tokens.beyond) - std::ssize(first);
  f.why.push_back(join(first, ", ") + (more > 0 ? " and " + with_commas(more) + " more" : "") + "; " + config_path +
                  " says vocab_size = " + with_commas(vocab_size) + ": the last row is " + with_commas(vocab_size - 1));
  f.advice =
      "A text with such a token fails at the embedding. Use the tokenizer that the model was trained with, or add "
      "the "
      "model's missing rows (resize_token_embeddings).";
  out.findings.push_back(std::move(f));
  return out;
}

}  // namespace reshard
