package main

import (
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// message is what a request tells to send. Body is base64 in JSON.
type message struct {
	Topic       string            `json:"topic"`
	Body        []byte            `json:"body"`
	Tag         *string           `json:"tag"`
	Keys        []string          `json:"keys"`
	Properties  map[string]string `json:"properties"`
	Delay       int               `json:"delay"`
	OrderingKey string            `json:"ordering_key"`
}

func (m *message) build() *primitive.Message {
	built := primitive.NewMessage(m.Topic, m.Body)
	if m.Tag != nil {
		built.WithTag(*m.Tag)
	}
	if len(m.Keys) > 0 {
		built.WithKeys(m.Keys)
	}
	for name, value := range m.Properties {
		built.WithProperty(name, value)
	}
	if m.Delay > 0 {
		built.WithDelayTimeLevel(m.Delay)
	}
	if m.OrderingKey != "" {
		built.WithShardingKey(m.OrderingKey)
	}
	return built
}

var statusNames = map[primitive.SendStatus]string{
	primitive.SendOK:                "SEND_OK",
	primitive.SendFlushDiskTimeout:  "FLUSH_DISK_TIMEOUT",
	primitive.SendFlushSlaveTimeout: "FLUSH_SLAVE_TIMEOUT",
	primitive.SendSlaveNotAvailable: "SLAVE_NOT_AVAILABLE",
}

func viewSent(sent *primitive.SendResult) object {
	return object{
		"status":    statusNames[sent.Status],
		"id":        sent.MsgID,
		"offset_id": sent.OffsetMsgID,
		"queue":     sent.MessageQueue.QueueId,
		"offset":    sent.QueueOffset,
	}
}

func viewMessage(m *primitive.MessageExt) object {
	view := object{
		"topic":      m.Topic,
		"body":       m.Body,
		"id":         m.MsgId,
		"offset_id":  m.OffsetMsgId,
		"tag":        nil,
		"properties": m.GetProperties(),
		"queue":      m.Queue.QueueId,
		"offset":     m.QueueOffset,
		"reconsumed": m.ReconsumeTimes,
		"born":       m.BornTimestamp,
		"stored":     m.StoreTimestamp,
		"size":       m.StoreSize,
	}
	if tag := m.GetTags(); tag != "" {
		view["tag"] = tag
	}
	return view
}

func viewMessages(messages []*primitive.MessageExt) []object {
	views := make([]object, 0, len(messages))
	for _, m := range messages {
		views = append(views, viewMessage(m))
	}
	return views
}
